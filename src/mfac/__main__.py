"""`python -m mfac`."""

from mfac.app.cli import main

if __name__ == "__main__":
    main()

"""`python -m mfac`."""

from mfac.cli import main

if __name__ == "__main__":
    main()

"""The command line: `mfac`, or `python -m mfac`."""

import sys

INSTALL = "the command line needs typer and rich: pip install 'torch-mfac[cli]'"


def main(arguments: list[str] | None = None) -> None:
    """Runs one command; see `mfac --help`."""
    try:
        from mfac.app.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        sys.stderr.write(f"mfac: {INSTALL}\n")
        sys.exit(1)
    app(args=arguments, prog_name="mfac")

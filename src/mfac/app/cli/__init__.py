"""The command line: `mfac`, or `python -m mfac`."""

import sys

NEEDED = ("typer", "rich", "jinja2", "safetensors", "matplotlib")


def main(arguments: list[str] | None = None) -> None:
    """Runs one command; see `mfac --help`."""
    try:
        from mfac.app.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in NEEDED:
            raise
        sys.stderr.write(f"mfac: the command line requires {error.name}: pip install 'torch-mfac[cli]'\n")
        sys.exit(1)
    app(args=arguments, prog_name="mfac")

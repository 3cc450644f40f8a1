"""The command line: `mfac`, or `python -m mfac`."""

import signal
import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich", "jinja2", "safetensors", "matplotlib")


def main(arguments: list[str] | None = None) -> None:
    """Runs one command; see `mfac --help`."""
    for stream in (found for found in (sys.stdout, sys.stderr) if hasattr(found, "reconfigure")):
        stream.reconfigure(errors="replace")  # not every encoding has the λ of the help
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"mfac: the command line requires {', '.join(missing)}: pip install 'torch-mfac[cli]'")
    from mfac.app.cli.commands import app
    from mfac.app.cli.options import Terminated

    signal.signal(signal.SIGTERM, Terminated.arrived)
    app(args=arguments, prog_name="mfac")

"""The command line."""

import argparse
from pathlib import Path

from mfac import __version__


def main(arguments: list[str] | None = None) -> None:
    """Runs one command; see `mfac --help`."""
    parser = argparse.ArgumentParser(prog="mfac", description="Second-order information for PyTorch, matrix-free.")
    parser.add_argument("--version", action="version", version=f"mfac {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="real gradients, exact answers, times and a plot, in under a minute")
    demo.add_argument("--out", type=Path, default=Path("mfac-demo"), metavar="FOLDER", help="where the plot goes")
    options = parser.parse_args(arguments)
    from mfac.demo import run  # scikit-learn and matplotlib are only needed here

    for line in run(options.out):
        print(line, flush=True)

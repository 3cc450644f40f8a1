"""`mfac init`: a task file to start from."""

from pathlib import Path
from typing import Annotated

import typer

from mfac.app.tasks import write_template


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must end in .py.")] = Path(
        "task.py"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
) -> None:
    """Write a task of your own to start from: a file that works as it is, to be changed piece by piece.

    \b
    Examples:
      mfac init
      mfac init experiments/spiral.py
    """
    write_template(file, force)
    typer.echo(f"{file} is there. It works as it is: try `mfac prune {file}`, then put your own model and data in.")

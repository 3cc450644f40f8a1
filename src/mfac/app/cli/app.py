"""The application: which commands there are."""

from typing import Annotated

import typer

from mfac import __version__
from mfac.app.cli.demo import demo
from mfac.app.cli.errors import reported
from mfac.app.cli.init import init
from mfac.app.cli.plan import plan
from mfac.app.cli.prune import prune
from mfac.app.cli.report import report
from mfac.app.cli.train import train

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mfac {__version__}")
        raise typer.Exit


@app.callback()
def overview(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Second-order information for PyTorch, matrix-free: prune models and train them with the inverse Fisher matrix.

    \b
    First steps:
      mfac demo                                     a tour of a minute
      mfac prune digits --sparsity 0.9              prune a small network that is built in
      mfac train digits --optimizer mfac --optimizer sgd
      mfac init task.py                             a task of your own to start from
    """


for command in (prune, train, plan, report, init, demo):
    app.command()(reported(command))

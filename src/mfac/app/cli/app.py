"""The application, and its short commands: report, init and demo."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mfac import __version__
from mfac.app import demo as tour
from mfac.app.cli.commands import plan, prune, train
from mfac.app.cli.display import ProgressDisplay, show_run
from mfac.app.cli.options import AsJson, command
from mfac.app.report import write_page
from mfac.app.runs.format import read_run
from mfac.app.tasks import write_template

TASK_FILE, DEMO_FOLDER = Path("task.py"), Path("mfac-demo")
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mfac {__version__}")
        raise typer.Exit


@app.callback()
def overview(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Matrix-free second-order methods for PyTorch: prune and train models with the inverse Fisher matrix.

    \b
    First steps:
      mfac demo                                     a tour of one minute
      mfac prune digits --sparsity 0.9              prune the built-in example
      mfac train digits                             train it, with FullMatrixAdam and with AdamW
      mfac init task.py                             write a task file for your own model
    """


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or run.json files.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a report.")] = False,
    as_json: AsJson = False,
) -> Any:
    """Make one self-contained HTML page from one or more runs.

    \b
    Examples:
      mfac report runs/digits-prune
      mfac report runs/digits-prune runs/digits-train --out both.html --title "Digits"
    """
    records = [read_run(run) for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(records, out, title, [run if run.is_dir() else run.parent for run in runs], force)
    return {"report": str(out), "runs": list(map(str, runs))} if as_json else typer.echo(f"Report: {out}")


@command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, which ends in .py.")] = TASK_FILE,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a complete task file, to be edited for your own model and data.

    \b
    Examples:
      mfac init
      mfac init experiments/spiral.py
    """
    write_template(file, force)
    typer.echo(f"Wrote {file}. It works as it is: try `mfac prune {file}`, then put in your own model and data.")


@command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the runs and the report.")] = DEMO_FOLDER,
) -> None:
    """Prune and train a small network on handwritten digits, with M-FAC and with the usual baselines.

    It takes about a minute, needs no download, and ends with two tables and a report.
    """
    with ProgressDisplay() as watcher:
        records = tour.run(out, watcher)
    for record in records:
        show_run(record)
        typer.echo("")
    tour.plot(records, out / "demo.png")
    page = (out / "report.html").resolve()
    title = "mfac demo: handwritten digits, pruned and trained"
    write_page(records, page, title, folders=[out / record["kind"] for record in records])
    typer.echo(f"Report: {page}")


for function in (prune, train, plan, report, init, demo):
    app.command()(function)

"""`mfac report`: one page from one run or several."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mfac.app.cli.options import AsJson
from mfac.app.cli.run_ending import write_report
from mfac.app.runs.run_folder import read_run


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or run.json files.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the page goes.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="What stands at its top.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make one page of HTML, complete in itself, from one run or several.

    \b
    Examples:
      mfac report runs/digits-prune
      mfac report runs/digits-prune runs/digits-train --out both.html --title "Digits"
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    page = write_report([read_run(run) for run in runs], out, title)
    if as_json:
        typer.echo(json.dumps({"report": str(page), "runs": [str(run) for run in runs]}))
    else:
        typer.echo(f"The page: {page}")

"""`mfac demo`: a tour of a minute."""

from pathlib import Path
from typing import Annotated

import typer

from mfac.app.cli.progress_display import ProgressDisplay
from mfac.app.cli.run_ending import write_report
from mfac.app.cli.tables import show_run


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the two runs and the page go.")] = Path(
        "mfac-demo"
    ),
) -> None:
    """Prune and train a small network on handwritten digits, by M-FAC and by what one would use instead.

    It takes about a minute, needs no download, and ends with two tables and a page to look at.
    """
    from mfac.app.demo import plot, run

    with ProgressDisplay() as watcher:
        records = run(out, watcher)
    for record in records:
        show_run(record)
        typer.echo("")
    plot(*records, out / "demo.png")
    page = write_report(list(records), out / "report.html", "mfac demo: handwritten digits, pruned and trained")
    typer.echo(f"The page: {page.resolve()}")

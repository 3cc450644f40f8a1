"""What prune and train do around a run: the page at its end, also when it was interrupted, and the table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from mfac.app.cli.progress_display import ProgressDisplay
from mfac.app.cli.tables import show_run
from mfac.app.runs.run_folder import REPORT, RUN, read_run
from mfac.app.runs.watcher import Watcher


def carry_out(folder: Path, run: Callable[[Watcher], dict[str, Any]], *, fresh: bool, as_json: bool) -> None:
    """Runs, writes report.html, and shows what came of it.

    Raises:
        KeyboardInterrupt: it was interrupted; with the sentence that says how to go on.
    """
    was_finished = not fresh and _is_finished(folder)
    try:
        with ProgressDisplay() as watcher:
            record = run(watcher)
    except KeyboardInterrupt:
        page = _page_of_what_there_is(folder)
        shown = f" ({page})" if page else ""
        raise KeyboardInterrupt(f"what is done is kept in {folder}{shown}; the same command goes on") from None
    if was_finished and not as_json:
        typer.echo(f"{folder} is finished already; --fresh starts it over.")
    if not as_json:
        show_run(record)
    page = write_report([record], folder / REPORT)
    if as_json:
        typer.echo(json.dumps({**record, "folder": str(folder), "report": str(page)}, allow_nan=False))
    else:
        typer.echo(f"The page: {page}")


def write_report(records: list[dict[str, Any]], path: Path, title: str | None = None) -> Path:
    """Writes the page of some runs, and returns its path."""
    from mfac.app.report import write_page

    write_page(records, path, title)
    return path


def _is_finished(folder: Path) -> bool:
    try:
        return (folder / RUN).exists() and read_run(folder)["finished"] is not None
    except ValueError:
        return False  # the run itself says what is wrong


def _page_of_what_there_is(folder: Path) -> Path | None:
    """The page of a run that was interrupted, if a cell of it is complete."""
    try:
        record = read_run(folder)
        return write_report([record], folder / REPORT) if record["cells"] else None
    except Exception:
        return None  # whatever it is: that the run was interrupted is what matters now

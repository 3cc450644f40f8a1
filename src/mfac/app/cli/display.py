"""What people see: progress on stderr, as bars or lines, and results as tables on stdout."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mfac.app.runs.run import Watcher

LINE_INTERVAL = 30.0  # seconds between lines, if there is no terminal
Row = Sequence[str]


class ProgressDisplay(Watcher):
    """Shows a run: `with ProgressDisplay() as watcher: ...`. Bars on a terminal, otherwise a line now and then."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._bars: Progress | None = None
        self._bar: Any = None
        self._what, self._total, self._note = "", 0.0, ""
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            what, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
            columns = (what, BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn(), note)
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, what: str, total: float) -> None:
        self._what, self._total, self._note = what, total, ""
        self._began = self._last_line = time.monotonic()
        if self._bars is not None:
            self._bar = self._bars.add_task(what, total=total, note="")

    def at(self, done: float, note: str = "") -> None:
        if self._bars is not None:
            self._note = note or self._note
            self._bars.update(self._bar, completed=done, note=self._note)
        elif time.monotonic() - self._last_line >= LINE_INTERVAL:
            self._last_line = time.monotonic()
            self.say(f"{self._what}: {done:.4g} of {self._total:g} steps{f', {note}' if note else ''}")

    def end(self) -> None:
        if self._bars is not None:
            self._bars.update(self._bar, completed=self._total)
        else:
            self.say(f"{self._what}: done in {time.monotonic() - self._began:.1f} s")

    def say(self, line: str) -> None:
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
        else:
            typer.echo(line, err=True)


def show_run(record: dict[str, Any]) -> None:
    """Prints the table of a run: one row for each cell, and in pruning one for the dense model."""
    rows: list[Row] = []
    if record["kind"] == "prune":
        header: Row = ("method", "sparsity", "loss", record["task"]["measure"], "seconds", "compact file")
        if "dense" in record:
            rows.append(("dense", "", number(record["dense"]["loss"]), number(record["dense"]["measure"]), "", ""))
        for cell in record["cells"]:
            numbers = (number(cell["loss"]), number(cell["measure"]), f"{cell['seconds']:.1f}")
            rows.append((cell["label"], f"{cell['sparsity']:.4f}", *numbers, f"{cell['bytes']['compact']:,} bytes"))
    else:
        header = ("optimizer", "seed", "steps", "training loss", "loss", record["task"]["measure"], "seconds")
        for cell in record["cells"]:
            last = cell["evaluations"][-1]
            numbers = (number(cell["losses"][-1]), number(last["loss"]), number(last["measure"]))
            rows.append(
                (cell["label"], f"{cell['seed']}", f"{cell['steps']}", *numbers, f"{cell['seconds_total']:.1f}")
            )
    show(record["title"], header, rows)


def number(value: float | None) -> str:
    """Four digits, or a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def show(title: str, header: Row, rows: Sequence[Row]) -> None:
    """Prints a table: with lines on a terminal, as aligned text elsewhere."""
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        _, *others = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join([f"{row[0]:<{widths[0]}}", *others]).rstrip())

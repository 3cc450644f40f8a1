"""Progress on stderr, as bars or lines, and results as tables on stdout."""

import time
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mfac.app.runs.run import Watcher

LINE_INTERVAL = 30.0  # seconds between lines, if there is no terminal


class ProgressDisplay(Watcher):
    """Shows a run: `with ProgressDisplay() as watcher: ...`. Bars on a terminal, otherwise a line now and then."""

    def __init__(self, console: Console | None = None):
        self.is_used = False
        self._console = console or Console(stderr=True)
        what, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        columns = (what, BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn(), note)
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bar, self._last_line = TaskID(0), 0.0

    def __enter__(self) -> "ProgressDisplay":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bars.disable:
            self._bars.stop()

    def begin(self, what: str, total: float) -> None:
        self.is_used, self._last_line = True, time.monotonic()
        self._bar = self._bars.add_task(what, total=total, note="")

    def at(self, done: float, note: str = "") -> None:
        bar = self._bars.tasks[self._bar]
        self._bars.update(self._bar, completed=done, note=note or bar.fields["note"])
        if self._bars.disable and time.monotonic() - self._last_line >= LINE_INTERVAL:
            self._last_line = time.monotonic()
            self.say(f"{bar.description}: {done:.4g} of {bar.total:g} steps{f', {note}' if note else ''}")

    def end(self) -> None:
        bar = self._bars.tasks[self._bar]
        self._bars.update(self._bar, completed=bar.total)
        if self._bars.disable:
            self.say(f"{bar.description}: done in {bar.elapsed:.1f} s")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_run(record: dict[str, Any]) -> None:
    """Prints the table of a run: one row for each cell, and in pruning one for the dense model."""
    measure, cells = record["task"]["measure"], record["cells"]
    if record["kind"] == "prune":
        dense = record["dense"]
        rows = [["method", "sparsity", "loss", measure, "seconds", "compact file"]]
        rows.append(["dense", "", number(dense["loss"]), number(dense["measure"]), "", ""])
        for cell in cells:
            found = [number(cell["loss"]), number(cell["measure"]), f"{cell['seconds']:.1f}"]
            rows.append([cell["label"], f"{cell['sparsity']:.4f}", *found, f"{cell['bytes']['compact']:,} bytes"])
    else:
        rows = [["optimizer", "seed", "steps", "training loss", "loss", measure, "seconds"]]
        for cell in cells:
            last = cell["evaluations"][-1]
            found = [number(value) for value in (cell["losses"][-1], last["loss"], last["measure"])]
            rows.append([cell["label"], f"{cell['seed']}", f"{cell['steps']}", *found, f"{cell['seconds_total']:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:  # as wide as it is: a narrow terminal wraps lines, and cuts off no digits
        figures = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        typer.echo("  ".join([first.ljust(widths[0]), *figures]).rstrip())


def number(value: float | None) -> str:
    """Four digits, or a dash for None."""
    return "-" if value is None else f"{value:.4g}"

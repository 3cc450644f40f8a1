"""Where a run is, for people: a bar on a terminal, a line now and then everywhere else; always on stderr."""

import sys
import time
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINES_APART = 30.0  # seconds, where there is no terminal


class ProgressDisplay:
    """A listener for runs (see `mfac.app.runs.watcher.Watcher`): `with ProgressDisplay() as watcher: ...`."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._bars: Progress | None = None
        self._bar: Any = None
        self._what, self._total, self._unit, self._note = "", 0.0, "", ""
        self._began = self._spoke = time.monotonic()

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DoneColumn(),
                RateColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, what: str, total: float, unit: str) -> None:
        """A piece of work begins, of `total` units."""
        self._what, self._total, self._unit, self._note = what, total, unit, ""
        self._began = self._spoke = time.monotonic()
        if self._bars is not None:
            self._bar = self._bars.add_task(what, total=total, note="", unit=unit)

    def at(self, done: float, note: str = "") -> None:
        """So many units are done."""
        if self._bars is not None:
            self._note = note or self._note
            self._bars.update(self._bar, completed=done, note=self._note)
        elif time.monotonic() - self._spoke >= LINES_APART:
            self._spoke = time.monotonic()
            self.say(f"{self._what}: {done:.4g} of {self._total:g} {self._unit}{f', {note}' if note else ''}")

    def end(self) -> None:
        """The piece of work is over."""
        if self._bars is not None:
            self._bars.update(self._bar, completed=self._total)
        else:
            self.say(f"{self._what}: done in {time.monotonic() - self._began:.1f} s")

    def say(self, line: str) -> None:
        """A line, above the bars where there are any."""
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
        else:
            typer.echo(line, err=True)
            sys.stderr.flush()


class DoneColumn(ProgressColumn):
    """5/16 steps; parts of one are not shown."""

    def render(self, task: Task) -> Text:
        """The count."""
        return Text(f"{int(task.completed)}/{task.total:g} {task.fields['unit']}")


class RateColumn(ProgressColumn):
    """Units a second, or seconds a unit where these are long."""

    def render(self, task: Task) -> Text:
        """The rate, as far as it is known."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each")

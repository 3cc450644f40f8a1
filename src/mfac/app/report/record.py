"""Run records (the dicts of run.json) as the report reads them: completed, in series, with names and units."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mfac.app.runs.folder import Record

MISSING, SPACE = "–", "\N{NO-BREAK SPACE}"
UNITS = {  # by base unit: (unit, the smallest value in base units that is written in it, base units in it)
    "s": (("h", 3 * 3600.0, 3600.0), ("min", 300.0, 60.0), ("s", 0.0, 1.0)),
    "bytes": (("GiB", 2.0**30, 2.0**30), ("MiB", 2.0**20, 2.0**20), ("KiB", 0.0, 2.0**10)),
}


class Quantity(NamedTuple):
    """A name and a unit; `factor` converts stored values to the unit; `decimals` None: four significant digits."""

    name: str
    unit: str = ""
    factor: float = 1.0
    decimals: int | None = None

    @classmethod
    def scaled(cls, name: str, values: Iterable[float | None], base: str) -> "Quantity":
        """A time or a size in the unit that suits its largest value."""
        largest = max((value for value in values if value is not None), default=0.0)
        return next(cls(name, unit, 1 / size) for unit, least, size in UNITS[base] if largest >= least)

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float | None, unit: bool = False) -> str:
        if value is None or not math.isfinite(value):
            return MISSING
        shown = value * self.factor
        text = f"{shown:#.4g}".rstrip(".") if self.decimals is None else f"{shown:,.{self.decimals}f}"
        return f"{text}{SPACE}{self.unit}" if unit and self.unit else text


LOSS, SPARSITY = Quantity("loss"), Quantity("sparsity", "%", 100, 2)


def percent(fraction: float) -> str:
    """A fraction in per cent with no more decimals than it needs: 90 %, 97.5 %."""
    return f"{round(100 * fraction, 2):g}{SPACE}%"


def capital(text: str) -> str:
    """The text with its first letter capitalized; AUC stays AUC."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Series:
    """The cells of one label in one run: one line in every plot."""

    label: str
    colour: int  # of the label, on the whole page
    repeat: int  # the number of runs before this one that have the same label
    run: Record
    cells: Sequence[Record]


def completed(runs: Sequence[Any]) -> list[Record]:
    """Copies of the runs, those of the same title numbered, with both kinds of cells in the same terms."""
    titles, known = [run["title"] for run in runs], []
    for place, (run, title) in enumerate(zip(runs, titles, strict=True)):
        title = f"{title} ({titles[:place].count(title) + 1})" if titles.count(title) > 1 else title
        cells = [_completed_cell(cell, run) for cell in run["cells"]]
        known.append({"dense": {}, **run, "title": title, "cells": cells})
    return known


def _completed_cell(cell: Record, run: Record) -> Record:
    if run["kind"] == "prune":
        dense, compact = cell["bytes"]["dense"], cell["bytes"]["compact"]
        more = {"time": cell["seconds"], "compact": compact, "ratio": dense / compact}
    else:
        pairs = enumerate(zip(cell["seconds"], cell["losses"], strict=True), 1)
        more = {key: cell["evaluations"][-1][key] for key in ("loss", "measure")}
        more |= {"training": [{"step": step, "second": second, "loss": loss} for step, (second, loss) in pairs]}
        more |= {"time": cell["seconds_total"], "step_count": cell["steps"], "last_loss": cell["losses"][-1]}
    found = {"asked": None, **cell, **more}
    return {**found, f"measure {run['task']['measure']}": found["measure"]}


def series_of(runs: Sequence[Record], kind: str) -> list[Series]:
    """All series of the runs of a kind, in the order of the cells; labels of several runs get the run's title."""
    labels = dict.fromkeys(cell["label"] for run in runs for cell in run["cells"])
    colours = sorted(labels, key=lambda label: not label.startswith("mfac"))
    found: dict[tuple[str, str], tuple[Record, list[Record]]] = {}
    for run in runs:
        for cell in run["cells"] if run["kind"] == kind else ():
            found.setdefault((cell["label"], run["title"]), (run, []))[1].append(cell)
    counts, seen, series = Counter(label for label, _ in found), Counter[str](), []
    for (label, title), (run, cells) in found.items():
        name = label if counts[label] == 1 else f"{label} · {title}"
        series.append(Series(name, colours.index(label), seen[label], run, cells))
        seen[label] += 1
    return series


def by_measure(series: Sequence[Series]) -> dict[Quantity, list[Series]]:
    """The series by what their tasks measure; an accuracy between 0 and 1 is written in per cent."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.run["task"]["measure"], []).append(one)
    found = {}
    for name, group in groups.items():
        values = [cell["measure"] for one in group for cell in one.cells if cell["measure"] is not None]
        share = "accuracy" in name.lower() and all(0 <= value <= 1 for value in values)
        found[Quantity(name, "%", 100, 1) if share else Quantity(name)] = group
    return found

"""Run records (the dicts of run.json) as the report reads them: completed, and grouped into series."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mfac.app.report.quantities import Quantity, measure_quantity

Record = dict[str, Any]
FORMAT, KINDS = 1, ("prune", "train")


@dataclass(frozen=True)
class Series:
    """The cells of one label in one run: one line in every plot.

    A label has one colour on the whole page; `repeat` counts the runs before this one that have the same label.
    """

    label: str
    colour: int
    repeat: int
    run: Record
    cells: Sequence[Record]


def completed(runs: Sequence[Any]) -> list[Record]:
    """Copies of the runs, those of the same title numbered, with both kinds of cells in the same terms.

    Raises:
        ValueError: there are no runs, or one is not the content of a run.json.
    """
    if not runs:
        raise ValueError("a report needs at least one run and got an empty list; pass the contents of run.json files")
    for number, run in enumerate(runs, 1):
        found = (run.get("format"), run.get("kind")) if isinstance(run, dict) else type(run).__name__
        if found not in [(FORMAT, kind) for kind in KINDS]:
            raise ValueError(f"run {number}: expected the dict of a run.json of format {FORMAT}, got {found}")
    titles, known = [run["title"] for run in runs], []
    for place, run in enumerate(runs):
        before, in_all = titles[:place].count(run["title"]), titles.count(run["title"])
        title = f"{run['title']} ({before + 1})" if in_all > 1 else run["title"]
        cells = [_completed_cell(cell, run) for cell in run["cells"]]
        known.append({"dense": {}, **run, "title": title, "cells": cells})
    return known


def _completed_cell(cell: Record, run: Record) -> Record:
    """The cell with its final loss and measure, its time, and the losses of its training."""
    if run["kind"] == "prune":
        dense, compact = cell["bytes"]["dense"], cell["bytes"]["compact"]
        more = {"time": cell["seconds"], "compact": compact, "ratio": dense / compact}
    else:
        pairs = enumerate(zip(cell["seconds"], cell["losses"], strict=True), 1)
        training = [{"step": step, "second": second, "loss": loss} for step, (second, loss) in pairs]
        final = {key: cell["evaluations"][-1][key] for key in ("loss", "measure")}
        more = {**final, "asked": None, "time": cell["seconds_total"], "training": training}
        more |= {"step_count": cell["steps"], "last_loss": cell["losses"][-1]}
    found = {**cell, **more}
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
    """The series by what their tasks measure."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.run["task"]["measure"], []).append(one)
    return {
        measure_quantity(name, [cell["measure"] for one in group for cell in one.cells]): group
        for name, group in groups.items()
    }

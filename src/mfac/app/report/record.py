"""Run records (the dicts of run.json) as the report reads them: checked, completed, and grouped into series."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mfac.app.report.quantities import Quantity, measure_quantity

Record = dict[str, Any]
FORMAT = 1


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


def checked(runs: Sequence[Any]) -> Sequence[Record]:
    """The runs, or a ValueError for anything that is not the content of a run.json."""
    if not runs:
        raise ValueError("a report needs at least one run and got an empty list; pass the contents of run.json files")
    for number, run in enumerate(runs, 1):
        if not isinstance(run, dict):
            found = type(run).__name__
            raise ValueError(f"run {number}: expected the dict of a run.json, got {found}; read it with json.load")
        if run.get("format") != FORMAT:
            raise ValueError(f"run {number}: expected format {FORMAT}, got {run.get('format')!r}; repeat the run")
        if run.get("kind") not in ("prune", "train"):
            raise ValueError(f"run {number}: expected the kind 'prune' or 'train', got {run.get('kind')!r}")
        cells = run.get("cells")
        if not isinstance(cells, list) or not all(isinstance(cell, dict) and cell.get("label") for cell in cells):
            raise ValueError(
                f"run {number}: expected 'cells' to be a list of dicts with a label; is run.json complete?"
            )
    return runs


def completed(runs: Sequence[Any]) -> list[Record]:
    """Copies of the runs with a title and a measure each, runs of the same title numbered, and complete cells."""
    runs = [{**run, "task": run.get("task") or {}, "dense": run.get("dense") or {}} for run in checked(runs)]
    titles = [str(run.get("title") or run["task"].get("name") or run["kind"]) for run in runs]
    for place, (run, title) in enumerate(zip(runs, titles, strict=True)):
        number = f" ({titles[: place + 1].count(title)})" if titles.count(title) > 1 else ""
        run |= {"title": title + number, "measure": str(run["task"].get("measure") or "measure")}
        run["cells"] = [_completed_cell(cell, run) for cell in run["cells"]]
    return runs


def _completed_cell(cell: Record, run: Record) -> Record:
    """Both kinds of cells in the same terms: final loss and measure, time, and the sparsity asked for."""
    losses, size, asked = cell.get("losses") or [], cell.get("bytes") or {}, cell.get("asked")
    last_loss = next((loss for loss in reversed(losses) if loss is not None), None)
    pruned = run["kind"] == "prune"
    timed = zip_longest(losses, ([] if pruned else cell.get("seconds") or [])[: len(losses)])
    training = [{"step": step, "second": second, "loss": loss} for step, (loss, second) in enumerate(timed, 1)]
    final = cell if pruned else (cell.get("evaluations") or [{"loss": last_loss}])[-1]
    if pruned and asked is None:  # patterns such as 2:4 ask for no sparsity: the one reached stands in for it
        asked = round(cell.get("sparsity") or 0.0, 3)
    return {
        **cell,
        "label": str(cell["label"]),
        "asked": asked,
        "loss": final.get("loss"),
        "measure": final.get("measure"),
        f"measure {run['measure']}": final.get("measure"),
        "last_loss": last_loss,
        "training": (cell.get("training") or []) if pruned else training,
        "step_count": None if pruned else cell.get("steps") or len(losses),
        "time": cell.get("seconds" if pruned else "seconds_total"),
        "compact": size.get("compact"),
        "ratio": size["dense"] / size["compact"] if size.get("dense") and size.get("compact") else None,
    }


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
        groups.setdefault(one.run["measure"], []).append(one)
    return {
        measure_quantity(name, [cell["measure"] for one in group for cell in one.cells]): group
        for name, group in groups.items()
    }

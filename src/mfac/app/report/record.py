"""Run records (the dicts of run.json) as the report reads them: checked, and grouped into series."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def check_runs(runs: Sequence[Record]) -> None:
    """Raises a ValueError for anything that is not the record of a run."""
    if not runs:
        raise ValueError("a report needs at least one run and got an empty list; pass the contents of run.json files")
    for number, run in enumerate(runs, 1):
        _check_run(f"run {number}", run)


def _check_run(name: str, run: Any) -> None:
    if not isinstance(run, dict):
        raise ValueError(f"{name}: expected the dict of a run.json, got {type(run).__name__}; read it with json.load")
    if run.get("format") != FORMAT:
        raise ValueError(f"{name}: expected format {FORMAT}, got {run.get('format')!r}; repeat the run")
    if run.get("kind") not in ("prune", "train"):
        raise ValueError(f"{name}: expected the kind 'prune' or 'train', got {run.get('kind')!r}")
    cells = run.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and cell.get("label") for cell in cells):
        raise ValueError(f"{name}: expected 'cells' to be a list of dicts with a label; is this a complete run.json?")


def run_titles(runs: Sequence[Record]) -> list[str]:
    """A title for each run; runs with the same title are numbered."""
    titles = [str(run.get("title") or task_of(run).get("name") or run["kind"]) for run in runs]
    return [
        f"{title} ({titles[: place + 1].count(title)})" if titles.count(title) > 1 else title
        for place, title in enumerate(titles)
    ]


def series_of(runs: Sequence[Record], kind: str) -> list[Series]:
    """All series of the runs of a kind, in the order of the cells; labels of several runs get the run's title."""
    labels = dict.fromkeys(str(cell["label"]) for run in runs for cell in run["cells"])
    colours = {label: n for n, label in enumerate(sorted(labels, key=lambda label: not label.startswith("mfac")))}
    found: dict[tuple[str, str], tuple[Record, list[Record]]] = {}
    for run in runs:
        for cell in run["cells"] if run["kind"] == kind else ():
            found.setdefault((str(cell["label"]), run["title"]), (run, []))[1].append(cell)
    counts, seen, series = Counter(label for label, _ in found), Counter[str](), []
    for (label, title), (run, cells) in found.items():
        name = label if counts[label] == 1 else f"{label} · {title}"
        series.append(Series(name, colours[label], seen[label], run, cells))
        seen[label] += 1
    return series


def by_measure(series: Sequence[Series]) -> dict[str, list[Series]]:
    """The series by the name of what their task measures."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(str(task_of(one.run).get("measure") or "measure"), []).append(one)
    return groups


def task_of(run: Record) -> Record:
    """The task's part of a record, empty if there is none."""
    return run.get("task") or {}


def asked_of(cell: Record) -> float:
    """The sparsity asked for; patterns such as 2:4 ask for none, and the sparsity reached stands in for it."""
    asked = cell.get("asked")
    return float(asked if asked is not None else round(cell.get("sparsity") or 0.0, 3))


def last_entry(cell: Record) -> Record:
    """Where a cell's final loss and measure are: in a pruned cell itself, in a training's last evaluation or loss."""
    if "seed" not in cell:
        return cell
    return (cell.get("evaluations") or [{"loss": last_loss(cell)}])[-1]


def last_loss(cell: Record) -> float | None:
    """The last finite training loss."""
    return next((loss for loss in reversed(cell.get("losses") or []) if loss is not None), None)

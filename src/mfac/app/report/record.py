"""The records of runs (the dicts of run.json) as the report reads them: checked, and grouped into named series."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
FORMAT = 1
KINDS = ("prune", "train")


@dataclass(frozen=True)
class Series:
    """The cells of one label in one run: a line on every plot. `style` picks its colour, mark and dashes."""

    label: str
    style: int
    run: Record
    cells: tuple[Record, ...]


def check_runs(runs: Sequence[Record]) -> None:
    """Refuses what is no record of a run, before any of it is read.

    Raises:
        ValueError: no runs at all, or one that is not a dict of a format and kind known here.
    """
    if not runs:
        raise ValueError("a report needs at least one run and got an empty list; pass the contents of run.json files")
    for number, run in enumerate(runs, 1):
        _check_run(f"run {number}", run)


def _check_run(name: str, run: Any) -> None:
    if not isinstance(run, dict):
        raise ValueError(f"{name}: expected the dict of a run.json, got {type(run).__name__}; read it with json.load")
    if run.get("format") != FORMAT:
        raise ValueError(f"{name}: expected format {FORMAT}, got {run.get('format')!r}; make the run anew")
    if run.get("kind") not in KINDS:
        raise ValueError(f"{name}: expected the kind 'prune' or 'train', got {run.get('kind')!r}")
    cells = run.get("cells")
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and cell.get("label") for cell in cells):
        raise ValueError(f"{name}: expected 'cells' to be a list of dicts with a label; is this a whole run.json?")


def run_titles(runs: Sequence[Record]) -> list[str]:
    """A title for each run; where several runs share one, a number tells them apart."""
    return [f"{title} ({number})" if number else title for title, number in _numbered(runs)]


def series_of(runs: Sequence[Record], kind: str) -> list[Series]:
    """All series of the runs of a kind, in the order of the cells.

    A label that several runs have gets the run's title, or the number of the title where runs share that as well.
    """
    found: list[tuple[str, str, Record, list[Record]]] = []
    for (title, number), run in zip(_numbered(runs), runs, strict=True):
        if run["kind"] != kind:
            continue
        by_label: dict[str, list[Record]] = {}
        for cell in run["cells"]:
            by_label.setdefault(str(cell["label"]), []).append(cell)
        ending = f" ({number})" if number else f" · {title}"
        found += [(label, ending, run, cells) for label, cells in by_label.items()]
    runs_with = Counter(label for label, *_ in found)
    return [
        Series(label if runs_with[label] == 1 else f"{label}{ending}", style, run, tuple(cells))
        for style, (label, ending, run, cells) in enumerate(found)
    ]


def _numbered(runs: Sequence[Record]) -> list[tuple[str, int]]:
    """Titles, with a number from 1 on for those that several runs have, and 0 for the others."""
    titles = [str(run.get("title") or task_of(run).get("name") or run["kind"]) for run in runs]
    counts, seen = Counter(titles), Counter[str]()
    numbered = []
    for title in titles:
        seen[title] += 1
        numbered.append((title, seen[title] if counts[title] > 1 else 0))
    return numbered


def task_of(run: Record) -> Record:
    """The task's part of a record, empty where there is none."""
    return run.get("task") or {}


def measure_name(run: Record) -> str:
    """What the task's measure is called."""
    return str(task_of(run).get("measure") or "measure")


def higher_is_better(run: Record) -> bool:
    """Whether a higher measure is a better one."""
    return bool(task_of(run).get("higher_is_better", True))


def asked_of(cell: Record) -> float:
    """The sparsity that was asked for; patterns such as 2:4 ask for none, and what was reached stands in for it."""
    asked = cell.get("asked")
    return float(asked if asked is not None else round(cell.get("sparsity") or 0.0, 3))


def unfinished(runs: Sequence[Record]) -> list[int]:
    """The places of the runs that are not finished."""
    return [place for place, run in enumerate(runs) if not run.get("finished")]

"""The tasks of GLUE as lists of examples, read from their tab-separated files."""

import csv
from dataclasses import dataclass
from pathlib import Path

from experiments.datasets.folder import find


@dataclass(frozen=True)
class Example:
    """A sentence, or two, and the label: a class, or a number."""

    first: str
    second: str | None
    label: float


@dataclass(frozen=True)
class _Columns:
    folder: str
    first: str
    second: str | None
    label: str
    classes: tuple[str, ...]  # none: the label is a number


COLUMNS = {
    "mrpc": _Columns("MRPC", "#1 String", "#2 String", "Quality", ("0", "1")),
    "stsb": _Columns("STS-B", "sentence1", "sentence2", "score", ()),
    "rte": _Columns("RTE", "sentence1", "sentence2", "label", ("entailment", "not_entailment")),
    "sst2": _Columns("SST-2", "sentence", None, "label", ("0", "1")),
}


def read_tsv(path: Path) -> list[dict[str, str]]:
    """The lines of a tab-separated file under its header; quotes are letters like any other.

    Raises:
        ValueError: a line has more or fewer fields than the header.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    for number, line in enumerate(lines, 2):
        if None in line or None in line.values():
            raise ValueError(f"{path}:{number}: another number of fields than in the header; is the file whole?")
    return lines


def load_glue(task: str, split: str) -> list[Example]:
    """The examples of "mrpc", "stsb", "rte" or "sst2", of "train" or "dev".

    Classes are numbered in the order of `COLUMNS`; scores of STS-B are from 0 to 5.

    Raises:
        MissingData: it is not in the data folder.
        ValueError: another task or split, or a file that does not have its columns and labels.
    """
    if task not in COLUMNS:
        raise ValueError(f"task must be one of {', '.join(COLUMNS)}, not {task!r}")
    if split not in ("train", "dev"):
        raise ValueError(f'split must be "train" or "dev" (the test labels are not public), not {split!r}')
    columns = COLUMNS[task]
    path = find(f"glue-{task}", "glue", columns.folder, f"{split}.tsv")
    lines = read_tsv(path)
    wanted = [name for name in (columns.first, columns.second, columns.label) if name]
    if not lines or not all(name in lines[0] for name in wanted):
        raise ValueError(f"{path} must have lines under the columns {', '.join(wanted)}")
    return [_example(line, columns, f"{path}:{number}") for number, line in enumerate(lines, 2)]


def _example(line: dict[str, str], columns: _Columns, place: str) -> Example:
    label = line[columns.label]
    try:
        value = float(columns.classes.index(label)) if columns.classes else float(label)
    except ValueError:
        expected = " or ".join(columns.classes) or "a number"
        raise ValueError(f"{place}: the label must be {expected}, not {label!r}") from None
    return Example(line[columns.first], line[columns.second] if columns.second else None, value)

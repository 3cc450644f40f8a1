"""The tasks of GLUE as lists of examples, read from their tab-separated files."""

import csv
from pathlib import Path
from typing import NamedTuple

from experiments.datasets.folder import find


class Example(NamedTuple):
    """One sentence or two, and the label: a class, or a number."""

    first: str
    second: str | None
    label: float


class Columns(NamedTuple):
    """Where the parts of an example are; without classes the label is a number."""

    folder: str
    first: str
    second: str | None
    label: str
    classes: tuple[str, ...]


COLUMNS = {
    "mrpc": Columns("MRPC", "#1 String", "#2 String", "Quality", ("0", "1")),
    "stsb": Columns("STS-B", "sentence1", "sentence2", "score", ()),
    "rte": Columns("RTE", "sentence1", "sentence2", "label", ("entailment", "not_entailment")),
    "sst2": Columns("SST-2", "sentence", None, "label", ("0", "1")),
}


def load_glue(task: str, split: str) -> list[Example]:
    """The examples of a task of `COLUMNS`, of "train" or "dev"; classes are numbered in the order of `COLUMNS`."""
    if task not in COLUMNS:
        raise ValueError(f"task must be one of {', '.join(COLUMNS)}, not {task!r}")
    if split not in ("train", "dev"):
        raise ValueError(f'split must be "train" or "dev" (the test labels are not public), not {split!r}')
    columns = COLUMNS[task]
    path = find(f"glue-{task}", "glue", columns.folder, f"{split}.tsv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))  # quotes are ordinary characters
    wanted = [name for name in (columns.first, columns.second, columns.label) if name]
    if not lines or not all(name in lines[0] for name in wanted):
        raise ValueError(f"{path} must have lines under the columns {', '.join(wanted)}")
    return [_example(line, columns, path, number) for number, line in enumerate(lines, 2)]


def _example(line: dict[str, str], columns: Columns, path: Path, number: int) -> Example:
    if None in line or None in line.values():
        raise ValueError(f"{path}:{number}: the number of fields differs from the header's; is the file complete?")
    label = line[columns.label]
    try:
        value = float(columns.classes.index(label)) if columns.classes else float(label)
    except ValueError:
        expected = " or ".join(columns.classes) or "a number"
        raise ValueError(f"{path}:{number}: the label must be {expected}, not {label!r}") from None
    return Example(line[columns.first], line[columns.second] if columns.second else None, value)

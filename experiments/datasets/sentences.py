"""The tasks of GLUE as lists of examples, read from their tab-separated files, and as batches of tokens."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from experiments.datasets.folder import find

Batch = dict[str, Tensor]


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


class Tokens(NamedTuple):
    """Of one example: token ids, which of the two sentences each belongs to, and the label."""

    ids: list[int]
    types: list[int]
    label: float


def encode(task: str, split: str, tokenizer: Any, longest: int, cut: bool = True) -> list[Tokens]:
    """All examples; those over `longest` tokens are cut, or left out."""
    examples = load_glue(task, split)
    second: Any = None if examples[0].second is None else [example.second for example in examples]
    limit = {"truncation": True, "max_length": longest} if cut else {}
    encoded = tokenizer([example.first for example in examples], second, **limit)
    rows = zip(encoded["input_ids"], encoded["token_type_ids"], examples, strict=True)
    return [Tokens(ids, types, example.label) for ids, types, example in rows if len(ids) <= longest]


class SentenceBatches:
    """Batches as a Hugging Face model takes them; `regression`: labels are numbers.

    The order of a shuffled pass is drawn from `generator` or torch's global state; a smaller last batch is left out.
    """

    def __init__(
        self, examples: list[Tokens], batch_size: int, *, shuffle: bool = False, regression: bool = False,
        generator: torch.Generator | None = None,
    ):  # fmt: skip
        self.examples, self.batch_size, self.shuffle, self.generator = examples, batch_size, shuffle, generator
        self.dtype = torch.float32 if regression else torch.int64

    def __len__(self) -> int:
        whole, rest = divmod(len(self.examples), self.batch_size)
        return whole + bool(rest and not self.shuffle)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.examples)
        order = torch.randperm(count, generator=self.generator).tolist() if self.shuffle else range(count)
        for i in range(len(self)):
            yield self._collate([self.examples[k] for k in order[i * self.batch_size : (i + 1) * self.batch_size]])

    def _collate(self, chosen: list[Tokens]) -> Batch:
        parts = ([example.ids for example in chosen], [example.types for example in chosen],
                 [[1] * len(example.ids) for example in chosen])  # fmt: skip
        ids, types, mask = (pad_sequence([torch.tensor(row) for row in part], True) for part in parts)  # 0 is [PAD]
        labels = torch.tensor([example.label for example in chosen], dtype=self.dtype)
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels}

"""The tasks of GLUE as batches of tokens, each padded to its longest example."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from experiments.datasets.sentences import load_glue

Batch = dict[str, Tensor]


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

"""The tasks of GLUE as batches of tokens, each padded to its longest sentence."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mfac.datasets import load_glue


@dataclass(frozen=True)
class Tokens:
    """Of one sentence or pair: the ids, which of the two sentences each belongs to, and the label."""

    ids: list[int]
    types: list[int]
    label: float


def encode(task: str, split: str, tokenizer: Any, longest: int, cut: bool = True) -> list[Tokens]:
    """All examples; those over `longest` tokens are cut, or left out."""
    examples = load_glue(task, split)
    second = None if examples[0].second is None else [example.second for example in examples]
    limit = {"truncation": True, "max_length": longest} if cut else {}
    encoded = tokenizer([example.first for example in examples], second, **limit)
    rows = zip(encoded["input_ids"], encoded["token_type_ids"], examples, strict=True)
    return [Tokens(ids, types, example.label) for ids, types, example in rows if len(ids) <= longest]


class SentenceBatches:
    """Batches as a Hugging Face model takes them.

    Args:
        examples: of `encode`.
        batch_size: of every batch; a smaller last one is left out where batches are shuffled.
        regression: labels are numbers, not classes.
        seed: of the order, anew in each pass; None: in order.
    """

    def __init__(self, examples: list[Tokens], batch_size: int, *, regression: bool, seed: int | None = None):
        self.examples, self.batch_size = examples, batch_size
        self.dtype = torch.float32 if regression else torch.int64
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.examples), self.batch_size)
        return whole + bool(rest and self.generator is None)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        count = len(self.examples)
        order = range(count) if self.generator is None else torch.randperm(count, generator=self.generator).tolist()
        for i in range(len(self)):
            yield self._collate([self.examples[k] for k in order[i * self.batch_size : (i + 1) * self.batch_size]])

    def _collate(self, chosen: list[Tokens]) -> dict[str, Tensor]:
        width = max(len(example.ids) for example in chosen)
        ids, types, mask = (torch.zeros(len(chosen), width, dtype=torch.int64) for _ in range(3))  # 0 is [PAD]
        for row, example in enumerate(chosen):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            types[row, : len(example.ids)] = torch.tensor(example.types)
            mask[row, : len(example.ids)] = 1
        labels = torch.tensor([example.label for example in chosen], dtype=self.dtype)
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels}

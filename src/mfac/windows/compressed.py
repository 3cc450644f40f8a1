"""Rows that are not stored as a matrix: pieces of their columns are made when they are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products
from mfac.pages import WIDE_PIECE, Pages


@dataclass(frozen=True)
class MadeColumns:
    """Columns that are made when they are read: a source for `Pages`."""

    shape: tuple[int, int]
    dtype: torch.dtype
    load: Callable[[int, int], Tensor]
    gather: Callable[[Tensor], Tensor]

    @classmethod
    def pages(cls, dim: int, load: Callable[[int, int], Tensor], gather: Callable[[Tensor], Tensor]) -> Pages:
        """Pages over them, with pieces of moderate memory."""
        example = load(0, 1)
        source = cls((len(example), dim), example.dtype, load, gather)
        return Pages(source, example.device, max(1, WIDE_PIECE // len(example)))


class CompressedRows(ABC):
    """What can be asked of rows once pieces of their columns can be made."""

    shape: tuple[int, int]

    @abstractmethod
    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Consecutive columns of the first n rows: a new matrix."""

    @abstractmethod
    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Single columns of the first n rows."""

    def dense(self) -> Float[Tensor, "m d"]:
        return self.columns(self.shape[0], 0, self.shape[1])

    def pages(self, n: int) -> Pages:
        load, gather = partial(self.columns, n), partial(self.gather, n)
        return MadeColumns.pages(self.shape[1], load, gather)

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        step, d = max(1, products.TILE // n), self.shape[1]
        pieces = (self.columns(n, start, min(start + step, d)) for start in range(0, d, step))
        return sum((products.gram(piece, dtype) for piece in pieces), torch.zeros(()))

"""Rows that are not stored as a matrix: pieces of their columns are made when they are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products
from mfac.pages import Pages


class MadePages(Pages):
    """Pages whose columns are made when they are asked for; none is held longer than it is worked on.

    Args:
        example: any column, for the number of rows, the dtype and the device.
        dim: d.
        load: (start, stop) -> those columns.
        gather: indices -> single columns.
    """

    def __init__(
        self,
        example: Float[Tensor, "m 1"],
        dim: int,
        load: Callable[[int, int], Tensor],
        gather: Callable[[Tensor], Tensor],
    ):
        super().__init__(example.expand(-1, dim), example.device)
        self._load = load
        self._gather = gather

    @property
    def in_place(self) -> bool:
        return False

    def load(self, columns: slice) -> Float[Tensor, "m columns"]:
        return self._load(columns.start, columns.stop)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        return self._gather(indices.to(self.device))


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
        return MadePages(load(0, 1), self.shape[1], load, gather)

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        step, d = max(1, products.TILE // n), self.shape[1]
        pieces = (self.columns(n, start, min(start + step, d)) for start in range(0, d, step))
        return sum((products.gram(piece, dtype) for piece in pieces), torch.zeros(()))

"""Columns of compressed rows, made a piece at a time, for all that goes over columns."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products
from mfac.pages import Pages

Load = Callable[[int, int], Tensor]
Gather = Callable[[Tensor], Tensor]


class CompressedPages(Pages):
    """Pages whose columns are read from compressed rows; no piece is held longer than it is worked on.

    Args:
        first: any column, which says how many rows there are, in which dtype and where.
        dim: d.
        load: (start, stop) -> those columns.
        gather: indices -> single columns.
    """

    def __init__(self, first: Float[Tensor, "m 1"], dim: int, load: Load, gather: Gather):
        super().__init__(first.expand(-1, dim), first.device)
        self._load = load
        self._gather = gather

    @property
    def in_place(self) -> bool:
        """Never: columns are made when they are asked for."""
        return False

    def load(self, columns: slice) -> Float[Tensor, "m columns"]:
        """The columns, as stored."""
        return self._load(columns.start - self.first, columns.stop - self.first)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Single columns, as stored."""
        return self._gather((indices - self.first).to(self.device))


class CompressedRows(ABC):
    """Rows that are no matrix: what can be asked of them once pieces of their columns can be made."""

    shape: tuple[int, int]

    @abstractmethod
    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Columns side by side of the first n rows, as stored: a matrix of its own."""

    @abstractmethod
    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Single columns of the first n rows, as stored."""

    def dense(self) -> Float[Tensor, "m d"]:
        """All rows, as stored: a matrix of its own."""
        return self.columns(self.shape[0], 0, self.shape[1])

    def pages(self, n: int) -> Pages:
        """Pieces of columns, made when they are asked for."""
        load, gather = partial(self.columns, n), partial(self.gather, n)
        return CompressedPages(load(0, 1), self.shape[1], load, gather)

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        """G Gᵀ of the first n rows: computed in `dtype`, in float64."""
        return gram_of(self.pages(n), dtype)


def gram_of(pages: Pages, dtype: torch.dtype) -> Float[Tensor, "m m"]:
    """G Gᵀ over pages, computed in `dtype`, in float64."""
    m, d = pages.shape
    step = max(1, products.TILE // m)
    K = torch.zeros(m, m, dtype=torch.float64, device=pages.device)
    for start in range(0, d, step):
        K += products.gram(pages.load(slice(start, min(start + step, d))), dtype)
    return K

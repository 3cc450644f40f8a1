"""Columns of compressed rows, made a piece at a time, for the parts of an operator that go over columns."""

from collections.abc import Callable

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
        return self._load(columns.start, columns.stop)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Single columns, as stored."""
        return self._gather(indices)


def gram_of(pages: Pages, dtype: torch.dtype) -> Float[Tensor, "m m"]:
    """G Gᵀ over pages, computed in `dtype`, in float64."""
    m, d = pages.shape
    step = max(1, products.TILE // m)
    K = torch.zeros(m, m, dtype=torch.float64, device=pages.device)
    for start in range(0, d, step):
        K += products.gram(pages.load(slice(start, min(start + step, d))), dtype)
    return K

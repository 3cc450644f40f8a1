"""Products of matrices for rows of G, formed in memory that stays in the cache and copied from there.

Parts of rows begin anywhere in a cache line and have not been touched for long: a product that is written there
directly waits for memory again and again, where a copy goes through it once.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

STAGED, TOGETHER = 1 << 20, 1 << 18  # numbers that are formed at a time: of one large matrix, of several small ones


class RowProducts:
    """Adds products to rows; keeps the memory they are formed in."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def add(
        self,
        A: Float[Tensor, "c o t"],
        B: Float[Tensor, "c t i"],
        region: Float[Tensor, "n o i"],
        index: Int[Tensor, "c"] | None,
        is_first: bool,
    ) -> None:
        """Adds A B of sample s to region[s] (region[index[s]], if given); the first one overwrites what is there."""
        if region.device.type != "cpu":
            _add_together(A, B, region, index, is_first)
        elif A.shape[2] == 1 and is_first:
            _write_outer(A, B, region, index)
        else:
            rows = range(len(A)) if index is None else index.tolist()
            for samples, lines in _tiles(len(A), A.shape[1], B.shape[2]):
                value = self._formed(A[samples, lines], B[samples])
                _put(value, region[:, lines], rows[samples], is_first)

    def _formed(self, A: Float[Tensor, "c o t"], B: Float[Tensor, "c t i"]) -> Float[Tensor, "c o i"]:
        shape = (len(A), A.shape[1], B.shape[2])
        numbers = shape[0] * shape[1] * shape[2]
        if self._memory.dtype != A.dtype or self._memory.numel() < numbers:
            self._memory = A.new_empty(max(numbers, STAGED))
        return torch.bmm(A, B, out=self._memory[:numbers].view(shape))


def _tiles(c: int, o: int, i: int) -> Iterator[tuple[slice, slice]]:
    """(samples, lines of their matrices) that are formed at a time."""
    lines = o if o * i <= STAGED else max(1, STAGED // i)
    samples = max(1, TOGETHER // (o * i))
    for first in range(0, c, samples):
        for top in range(0, o, lines):
            yield slice(first, first + samples), slice(top, top + lines)


def _put(value: Float[Tensor, "c o i"], region: Float[Tensor, "n o i"], rows: Sequence[int], is_first: bool) -> None:
    """Copies or adds value[s] to region[rows[s]], rows that are side by side together."""
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop] != rows[stop - 1] + 1:
            part, into = value[start:stop], region[rows[start] : rows[stop - 1] + 1]
            _ = into.copy_(part) if is_first else into.add_(part)
            start = stop


def _write_outer(A: Tensor, B: Tensor, region: Tensor, index: Tensor | None) -> None:
    """An outer product is bound by memory, and other products are slow at it."""
    if index is None:
        torch.mul(A, B, out=region)
    else:
        for row, a, b in zip(index.tolist(), A.unbind(), B.unbind(), strict=True):
            torch.mul(a, b, out=region[row])


def _add_together(A: Tensor, B: Tensor, region: Tensor, index: Tensor | None, is_first: bool) -> None:
    """All in few calls, as accelerators like it."""
    if index is not None:
        value = torch.bmm(A, B)
        _ = region.index_copy_(0, index, value) if is_first else region.index_add_(0, index, value)
    elif is_first:
        torch.bmm(A, B, out=region)
    else:
        region.baddbmm_(A, B)

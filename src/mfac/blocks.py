"""Diagonal blocks of the Fisher matrix: where they lie, in which pieces they are streamed, and their running sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mfac import products


@dataclass(frozen=True)
class Run:
    """`count` adjacent blocks of `length` columns each, from column `start` on."""

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        """The column behind the last one."""
        return self.start + self.length * self.count

    def pieces(self, columns: int) -> Iterator["Piece"]:
        """Cuts the run into pieces of at most `columns` columns: whole blocks where they fit, else slices of one."""
        if self.length == 0:  # all that a rank has of a block may be nothing
            return
        if self.length <= columns:
            step = columns // self.length
            for first in range(0, self.count, step):
                last = min(first + step, self.count)
                yield Piece(first, last, self.start + first * self.length, self.start + last * self.length)
            return
        for block in range(self.count):
            end = self.start + (block + 1) * self.length
            for start in range(end - self.length, end, columns):
                yield Piece(block, block + 1, start, min(start + columns, end))


@dataclass(frozen=True)
class Piece:
    """Columns `start` to `stop` - 1: the blocks `first` to `last` - 1 of a run, or a slice of one of them."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def blocks(self) -> slice:
        """The blocks of the run that this piece belongs to."""
        return slice(self.first, self.last)

    @property
    def columns(self) -> slice:
        """The columns of G that this piece holds."""
        return slice(self.start, self.stop)

    def split_columns(self, G: Float[Tensor, "m columns"]) -> Float[Tensor, "blocks m length"]:
        """The piece's columns of G, one matrix a block; a view."""
        return G.unflatten(1, (self.last - self.first, -1)).transpose(0, 1)

    def split(self, x: Float[Tensor, "columns *k"]) -> Float[Tensor, "blocks length *k"]:
        """The piece's entries of x, one vector (or matrix) a block; a view."""
        return x.unflatten(0, (self.last - self.first, -1))


def block_runs(dim: int, block_size: int | None, sizes: Sequence[int] | None = None) -> list[Run]:
    """Lays blocks of at most `block_size` columns over `dim` columns.

    Args:
        dim: the number of columns.
        block_size: the length of a block; None: one block over all columns.
        sizes: lengths of the tensors that lie side by side in the columns; no block straddles two of them.

    Raises:
        ValueError: the block size is not a positive int, or the sizes do not add up to `dim`.
    """
    if block_size is None:
        if sizes is not None:
            raise ValueError("sizes was given without block_size; sizes only says where blocks end: give both or none")
        return [Run(0, dim, 1)]
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size must be a positive int or None (the full matrix), not {block_size!r}")
    sizes = [dim] if sizes is None else [int(size) for size in sizes]
    if sum(sizes) != dim or min(sizes, default=0) < 0:
        raise ValueError(f"sizes must be lengths that add up to the {dim} columns; they add up to {sum(sizes)}")
    runs: list[Run] = []
    start = 0
    for size in sizes:
        for length, count in ((block_size, size // block_size), (size % block_size, 1)):
            if length * count:
                _extend(runs, Run(start, length, count))
                start += length * count
    return runs


def runs_between(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The blocks that lie in the columns `start` to `stop` - 1, where both are ends of blocks."""
    found = []
    for run in runs:
        first, last = max(start, run.start), min(stop, run.stop)
        if first < last:
            found.append(Run(first, run.length, (last - first) // run.length))
    return found


def _extend(runs: list[Run], run: Run) -> None:
    """Appends a run, joined to the last one where both have blocks of one length: fewer, larger batches."""
    if runs and runs[-1].length == run.length:
        run = Run(runs[-1].start, run.length, runs.pop().count + run.count)
    runs.append(run)


class FisherBlocks:
    """The diagonal blocks of GᵀG, summed as rows come: memory O(block_size · dim), however many rows there are.

    Args:
        dim: length of a row.
        block_size: length of a block.
        sizes: lengths of the tensors that no block may straddle.
        device: where the sums live.
    """

    def __init__(
        self,
        dim: int,
        block_size: int,
        sizes: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ):
        self.dim = dim
        self.num_grads = 0
        self.runs = block_runs(dim, block_size, sizes)
        self.device = torch.device("cpu" if device is None else device)
        self.sums = [
            torch.zeros(run.count, run.length, run.length, dtype=torch.float64, device=self.device) for run in self.runs
        ]

    def add(self, rows: Float[Tensor, "k dim"]) -> None:
        """Adds the outer products of the rows, in float64.

        Raises:
            ValueError: the rows have another length, or one is not finite (nothing is added then).
        """
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"rows must be [k, {self.dim}], not {list(rows.shape)}")
        finite = torch.isfinite(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
        if not bool(finite.all()):
            raise ValueError(f"row {int((~finite).nonzero()[0])} of the rows to be added is not finite")
        rows = rows.to(self.device)
        for run, total in zip(self.runs, self.sums, strict=True):
            for piece in run.pieces(max(run.length, products.TILE // len(rows))):
                block_rows = piece.split_columns(rows[:, piece.columns])
                total[piece.blocks] += products.gram(block_rows.transpose(1, 2), torch.float64)
        self.num_grads += len(rows)

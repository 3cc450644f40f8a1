"""Columns divided among ranks or devices: contiguous shares of nearly equal length that do not split blocks."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mfac.memory import is_count
from mfac.pages import BlockRun, block_runs


@dataclass(frozen=True)
class ColumnShare:
    """Columns `start` to `stop` - 1 of the matrix of gradients.

    `sizes` are the lengths of the tensors, or pieces of tensors, in them: the `sizes` of a `StaticInverseFisher` that
    is given these columns alone.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]

    @property
    def columns(self) -> slice:
        """For indexing: `vector[share.columns]`."""
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


def column_shares(sizes: Sequence[int], count: int, block_size: int | None = None) -> tuple[ColumnShare, ...]:
    """Divides the columns into `count` shares, in order; some are empty if there are fewer blocks than shares.

    Args:
        sizes: lengths of the tensors whose weights are the columns.
        count: number of shares, one per rank or device.
        block_size: blocks of this many weights, none of which straddles two tensors, are not split; None: a share may
            end anywhere.
    """
    if not is_count(count):
        raise ValueError(f"count must be a positive number of shares, not {count!r}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must be lengths of tensors, not {list(sizes)}")
    dim = sum(sizes)
    runs = block_runs(dim, 1 if block_size is None else block_size, sizes)
    return _between(sizes, [_block_end(runs, dim * i // count) for i in range(count + 1)])


def shares_at(cuts: Sequence[int], sizes: Sequence[int], count: int) -> tuple[ColumnShare, ...]:
    """Divides the columns into `count` shares that end only at some of the `cuts`, which increase from 0 to d."""
    return _between(sizes, [_nearest(cuts, cuts[-1] * i // count) for i in range(count + 1)])


def _between(sizes: Sequence[int], ends: Sequence[int]) -> tuple[ColumnShare, ...]:
    tensors = list(pairwise(accumulate(sizes, initial=0)))
    shares = []
    for start, stop in pairwise(ends):
        lengths = (min(stop, last) - max(start, first) for first, last in tensors)
        shares.append(ColumnShare(start, stop, tuple(length for length in lengths if length > 0)))
    return tuple(shares)


def _block_end(runs: Sequence[BlockRun], column: int) -> int:
    """The end of a block nearest to a column."""
    ends = next((range(run.start, run.stop + 1, run.length) for run in runs if column <= run.stop), [column])
    return _nearest(ends, column)


def _nearest(cuts: Sequence[int], column: int) -> int:
    after = bisect_left(cuts, column)
    if after and column - cuts[after - 1] < cuts[after] - column:
        return cuts[after - 1]
    return cuts[after]

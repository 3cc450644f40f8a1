"""Bytes that pruning and training hold besides the model, and which settings would fit where these do not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from mfac.memory import gib
from mfac.pages import DISK_PIECE, WIDE_PIECE, block_runs
from mfac.pruning.step import ROWS_PER_BLOCK_SIZE
from mfac.windows import TopK, Window, as_kind, window_bytes

SUMMED_AT_ONCE = 32  # rows that wait to be added to the sums of blocks
VECTORS = 6  # of a pruning step, in float64: weights, scores, the change, and what they are made of
SMALLER: tuple[Window, ...] = (torch.bfloat16, torch.int8, TopK())
Items = dict[str, int]


@dataclass(frozen=True)
class PruningMemory:
    """What one recomputation of `mfac.prune` holds.

    Args:
        sizes: weights of each tensor that is pruned.
        num_grads: m.
        block_size: of the Fisher matrix; None: all of it.
        dtype: of the rows.
        on_disk: rows are in a file, and come a page at a time.
    """

    sizes: Sequence[int]
    num_grads: int
    block_size: int | None
    dtype: torch.dtype
    on_disk: bool = False

    @property
    def dim(self) -> int:
        """d."""
        return sum(self.sizes)

    @property
    def summed(self) -> bool:
        """Whether gradients are summed into blocks as they come, since their rows would take more."""
        if self.block_size is None or self.on_disk:
            return False
        return self.num_grads > ROWS_PER_BLOCK_SIZE * self.block_size

    @property
    def pages(self) -> int:
        """Column pages that G is read in from disk; each pass over G reads all of them."""
        return -(-self.dim // max(1, DISK_PIECE // self.num_grads))

    @property
    def row_bytes(self) -> int:
        """G, in memory or on disk."""
        return self.num_grads * self.dim * self.dtype.itemsize

    def items(self) -> Items:
        """{what: bytes}."""
        m = self.num_grads
        runs = block_runs(self.dim, self.block_size, None if self.block_size is None else self.sizes)
        squares = 8 * sum(run.count * min(run.length, m) ** 2 for run in runs)
        found: Items = {}
        if self.summed:
            found["gradients that wait"] = SUMMED_AT_ONCE * self.dim * self.dtype.itemsize
            found["sums of the blocks, two copies"] = 3 * squares
        elif self.on_disk:  # one page is worked on while the next is read
            found["pages of G"] = min(self.row_bytes, 2 * DISK_PIECE * self.dtype.itemsize)
        else:
            found["gradients G"] = self.row_bytes
        if self.block_size is None:  # G Gᵀ, its factor, the inverse of that, and G_R G_Rᵀ of the weights that stay
            found["m x m matrices"] = 4 * squares
            found["pieces at work"] = 8 * min(WIDE_PIECE, m * self.dim)
        else:
            found["factors of the blocks"] = squares
        found["vectors"] = VECTORS * 8 * self.dim
        return found

    def remedies(self, available: int) -> list[str]:
        """Other settings that would fit."""
        found = []
        if not self.on_disk and _total(replace(self, on_disk=True).items()) <= available:
            found.append(f"rows on disk (--rows-dir, {gib(self.row_bytes)} of it)")
        # Beyond this many, gradients are summed up, and their number does not matter.
        limit = self.num_grads - 1 if self.block_size is None else ROWS_PER_BLOCK_SIZE * self.block_size
        fewer = _largest(min(limit, self.num_grads - 1), partial(_fits, self, available))
        if fewer:
            found.append(f"num_grads={fewer}")
        for size in (128, 64, 32, 16):
            if self.block_size is not None and size >= self.block_size:
                continue
            if _total(replace(self, block_size=size).items()) <= available:
                found.append(f"block_size={size}")
                break
        return found


@dataclass(frozen=True)
class WindowMemory:
    """What the optimizer holds, and the gradients that it is given.

    Args:
        dim: d, trained weights.
        num_grads: m.
        window: how its rows are stored.
        computed: the dtype of gradients and steps.
        momentum: whether there is an average of steps.
    """

    dim: int
    num_grads: int
    window: Window
    computed: torch.dtype
    momentum: bool = False

    def items(self) -> Items:
        """{what: bytes}."""
        whole = window_bytes(self.num_grads, self.dim, self.window)
        rows = as_kind(self.window).bytes(self.num_grads, self.dim)
        vector = self.dim * self.computed.itemsize
        found = {"window G": rows, "m x m matrices": whole - rows, "gradient, row and step": 3 * vector}
        return {**found, "momentum": vector} if self.momentum else found

    def remedies(self, available: int) -> list[str]:
        """Other settings that would fit."""
        found = []
        m, d = self.num_grads, self.dim
        size = as_kind(self.window).bytes(m, d)
        for window in (self.window, *(other for other in SMALLER if as_kind(other).bytes(m, d) < size)):
            most = _largest(self.num_grads, partial(_fits, replace(self, window=window), available))
            if most:
                parts = [f"num_grads={most}"] if most < self.num_grads else []
                parts += [f"window={as_kind(window).name}"] if window != self.window else []
                found.append(" with ".join(parts))
        return found


def _total(items: Items) -> int:
    return sum(items.values())


def _fits(memory: PruningMemory | WindowMemory, available: int, num_grads: int) -> bool:
    return _total(replace(memory, num_grads=num_grads).items()) <= available


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` that fits, where all below one that fits do so too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

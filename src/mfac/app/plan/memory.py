"""Memory that pruning and training use besides the model, and settings that fit if the given ones do not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mfac.memory import gib
from mfac.pages import DISK_PIECE, WIDE_PIECE
from mfac.pruning.step import ROWS_PER_BLOCK_SIZE
from mfac.windows.storage import Window, as_kind, window_bytes
from mfac.windows.topk import TopK

SUMMED_AT_ONCE = 32  # rows that wait to be added to the sums of blocks
VECTORS = 6  # of a pruning step, in float64
SMALLER: tuple[Window, ...] = (torch.bfloat16, torch.int8, TopK())


@dataclass(frozen=True)
class PruningMemory:
    """One recomputation of `mfac.prune`: sizes of its tensors, m, block size, and dtype and place of the rows."""

    sizes: Sequence[int]
    num_grads: int
    block_size: int | None
    dtype: torch.dtype
    on_disk: bool = False

    @property
    def dim(self) -> int:
        return sum(self.sizes)

    @property
    def is_summed(self) -> bool:
        """Whether gradients are summed into blocks as they come, since their rows would take more."""
        return (
            self.block_size is not None and not self.on_disk and self.num_grads > ROWS_PER_BLOCK_SIZE * self.block_size
        )

    @property
    def pages(self) -> int:
        """Column pages in which G is read from disk."""
        return -(-self.dim // max(1, DISK_PIECE // self.num_grads))

    @property
    def row_bytes(self) -> int:
        return self.num_grads * self.dim * self.dtype.itemsize

    def items(self) -> dict[str, int]:
        """{what: bytes}."""
        m, B = self.num_grads, self.block_size or self.dim
        sizes = (self.dim,) if self.block_size is None else self.sizes
        squares = 8 * sum(size // B * min(B, m) ** 2 + min(size % B, m) ** 2 for size in sizes)
        found: dict[str, int] = {}
        if self.is_summed:
            found["rows to be summed"] = SUMMED_AT_ONCE * self.dim * self.dtype.itemsize
            found["sums of the blocks, two copies"] = 3 * squares
        elif self.on_disk:  # one page is worked on while the next is read
            found["pages of G"] = min(self.row_bytes, 2 * DISK_PIECE * self.dtype.itemsize)
        else:
            found["gradients G"] = self.row_bytes
        if self.block_size is None:  # G Gᵀ, its factor, the inverse of that, and G_R G_Rᵀ of the remaining weights
            found["m x m matrices"] = 4 * squares
            found["pieces in float64"] = 8 * min(WIDE_PIECE, m * self.dim)
        else:
            found["factors of the blocks"] = squares
        found["vectors"] = VECTORS * 8 * self.dim
        return found

    def remedies(self, available: int) -> Iterator[str]:
        """Other settings that fit."""
        if not self.on_disk and _fits(replace(self, on_disk=True), available):
            yield f"rows on disk (--rows-dir, {gib(self.row_bytes)})"
        limit = self.num_grads - 1 if self.block_size is None else ROWS_PER_BLOCK_SIZE * self.block_size
        fewer = _most_gradients(self, min(limit, self.num_grads - 1), available)
        if fewer:
            yield f"num_grads={fewer}"
        for size in (128, 64, 32, 16):
            if size < (self.block_size or self.dim) and _fits(replace(self, block_size=size), available):
                yield f"block_size={size}"
                return


@dataclass(frozen=True)
class WindowMemory:
    """The optimizer: d, m, how rows are stored, the dtype of gradients and steps, and whether there is momentum."""

    dim: int
    num_grads: int
    window: Window
    computed: torch.dtype
    momentum: bool = False

    def items(self) -> dict[str, int]:
        """{what: bytes}."""
        whole = window_bytes(self.num_grads, self.dim, self.window)
        rows, vector = as_kind(self.window).bytes(self.num_grads, self.dim), self.dim * self.computed.itemsize
        found = {"window G": rows, "m x m matrices": whole - rows, "gradient, row and step": 3 * vector}
        return {**found, "momentum": vector} if self.momentum else found

    def remedies(self, available: int) -> Iterator[str]:
        """Other settings that fit."""
        m, size = self.num_grads, as_kind(self.window).bytes(self.num_grads, self.dim)
        for window in (self.window, *(other for other in SMALLER if as_kind(other).bytes(m, self.dim) < size)):
            most = _most_gradients(replace(self, window=window), m, available)
            parts = [f"num_grads={most}"] if most < m else []
            parts += [f"window={as_kind(window).name}"] if window != self.window else []
            if most:
                yield " with ".join(parts)


def _fits(memory: PruningMemory | WindowMemory, available: int) -> bool:
    return sum(memory.items().values()) <= available


def _most_gradients(memory: PruningMemory | WindowMemory, limit: int, available: int) -> int:
    """The largest number of gradients up to `limit` that fits; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(replace(memory, num_grads=middle), available) else (low, middle - 1)
    return low

"""Where rows go as they come: a tensor, a file, or the diagonal blocks of the Fisher matrix."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mfac.blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.gradients.batches import ALIGNMENT
from mfac.memory import available_memory, gib

STAGING_BYTES = 256 * 2**20


class RowSink(Protocol):
    """Takes rows in order."""

    done: int
    """How many rows it has."""

    def room(self, count: int) -> tuple[Float[Tensor, "count d"], bool]:
        """Memory for the next `count` rows, and whether it holds zeros."""

    def take(self, count: int) -> None:
        """The first `count` rows of the room are complete."""


class TensorSink:
    """Rows in one tensor [num_grads, dim], filled in place.

    Raises:
        MemoryError: it would not fit.
    """

    def __init__(self, num_grads: int, dim: int, dtype: torch.dtype, device: torch.device):
        _check_memory(num_grads, dim, dtype, device)
        with torch.inference_mode(False):
            self.grads = _untouched_zeros(num_grads, dim, dtype, device)
        self.done = 0

    def room(self, count: int) -> tuple[Tensor, bool]:
        """The rows themselves."""
        return self.grads.narrow(0, self.done, count), True

    def take(self, count: int) -> None:
        """Counts."""
        self.done += count


class FileSink:
    """Rows appended to a `GradientFile`, which is made when the first of them is there.

    Args:
        path: a new file, or one to go on with.
        num_grads: rows in all.
        dim: their length.
        dtype: of the stored numbers.

    `fingerprint` is what to write into a new file, called when the first row is taken.

    Raises:
        OSError: the directory is not there, or the disk is too full.
    """

    def __init__(self, path: str | os.PathLike[str], num_grads: int, dim: int, dtype: torch.dtype):
        self.path = Path(path)
        self.num_grads, self.dim, self.dtype = num_grads, dim, dtype
        self.file = GradientFile(path) if self.path.exists() else None
        self.done = self.file.rows if self.file else 0
        self.fingerprint: Callable[[], str] = str
        self._staging = torch.empty(0, dim, dtype=self.dtype)
        self._check_disk()

    def room(self, count: int) -> tuple[Tensor, bool]:
        """Staging memory, used again and again."""
        if len(self._staging) < count:
            self._staging = torch.empty(count, self.dim, dtype=self.dtype)
        return self._staging[:count], False

    def take(self, count: int) -> None:
        """Writes the rows."""
        if not count:
            return
        if self.file is None:
            self.file = GradientFile.create(self.path, self.num_grads, self.dim, self.dtype, self.fingerprint())
        self.file.append(self._staging[:count])
        self.done += count

    def _check_disk(self) -> None:
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "out= needs a directory that exists", str(self.path.absolute().parent)
            )
        needed = (self.num_grads - self.done) * self.dim * self.dtype.itemsize
        free = shutil.disk_usage(self.path.absolute().parent).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{self.num_grads - self.done} rows take {gib(needed)} and the disk has {gib(free)} left; "
                "collect fewer rows, use window=torch.bfloat16, masks, or another disk",
                str(self.path),
            )


class BlocksSink:
    """Rows summed into `FisherBlocks`, some at a time: a product of matrices is faster than row after row."""

    def __init__(self, blocks: FisherBlocks, dtype: torch.dtype, device: torch.device, chunk: int = 32):
        self.blocks = blocks
        self.done = 0
        self._pending = 0
        capacity = max(1, min(chunk, STAGING_BYTES // max(1, blocks.dim * dtype.itemsize)))
        self._staging = torch.empty(capacity, blocks.dim, dtype=dtype, device=device)

    def room(self, count: int) -> tuple[Tensor, bool]:
        """The rows behind those that wait to be added."""
        if self._pending + count > len(self._staging):
            self.flush()
        if count > len(self._staging):
            self._staging = self._staging.new_empty(count, self.blocks.dim)
        return self._staging[self._pending : self._pending + count], False

    def take(self, count: int) -> None:
        """Lets them wait."""
        self._pending += count
        self.done += count

    def flush(self) -> None:
        """Adds what waits; to be called at the end."""
        if self._pending:
            self.blocks.add(self._staging[: self._pending])
            self._pending = 0


def _untouched_zeros(num_grads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that the system hands out page by page when they are written to, in large pages where it has them.

    The large parts of a row that stay zero (an embedding's) then cost nothing; `torch.zeros` writes them.
    """
    if device.type != "cpu":
        return torch.zeros(num_grads, dim, dtype=dtype, device=device)
    size = num_grads * dim * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(dtype).view(num_grads, dim)


def _check_memory(num_grads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    row = dim * dtype.itemsize
    needed, available = num_grads * row, available_memory(device)
    if available is None or needed <= available:
        return
    ways = [f"num_grads={available // row}"] if available >= row else []
    if dtype.itemsize > 2 and num_grads * dim * 2 <= available:
        ways.append(f"dtype=torch.bfloat16 ({gib(num_grads * dim * 2)})")
    ways += ["out='gradients.rows' on disk", "blocks of the Fisher matrix by accumulate_fisher"]
    raise MemoryError(
        f"{num_grads} gradients of {dim} numbers in {dtype} need {gib(needed)}, and {device} has {gib(available)} "
        f"available; what would fit: {', '.join(ways)}"
    )

"""Where rows go that are not kept in memory: a file, or the diagonal blocks of the Fisher matrix."""

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch

from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.gradients import resume
from mfac.gradients.batches import Batch, passes
from mfac.gradients.collection import Collection, NotFiniteError
from mfac.gradients.model_state import evaluation
from mfac.gradients.per_sample import STAGING_BYTES
from mfac.memory import available_memory, gib
from mfac.pages import block_runs

ROWS_AT_ONCE = 32  # are summed together: a product of matrices is faster than one row after the other


def collect_to_file(
    collection: Collection, batches: Iterable[Batch], path: str | os.PathLike[str], dtype: torch.dtype
) -> GradientFile:
    """Appends the rows that the file does not have; it is made when the first of them is there.

    Raises:
        ValueError: the file was made with other arguments.
        OSError: the directory does not exist, or the disk is too full.
    """
    path, dim = Path(path), collection.layout.dim
    file = GradientFile(path) if path.exists() else None
    done = file.rows if file else 0
    _check_disk(path, collection.num_grads - done, dim * dtype.itemsize)
    with evaluation(collection.model):
        stream = passes(batches, collection.cycle)
        head = next(stream, None)
        if head is None:
            raise ValueError("batches is empty; at least one batch is needed")
        entries = resume.fields(collection, head)
        if file is not None:
            collection.plan = resume.check(file, entries, collection, dtype)
            if done == collection.num_grads:
                return file
        staging = torch.empty(1, dim, dtype=dtype)
        for chunk in collection.chunks(chain([head], stream), done):
            if len(staging) < chunk.count:
                staging = torch.empty(chunk.count, dim, dtype=dtype)
            known, good, failure = max(0, done - chunk.row), chunk.count, None
            try:
                collection.fill(chunk, staging[: chunk.count])
            except NotFiniteError as error:
                good, failure = error.good, error
            if good > known:
                file = file or GradientFile.create(
                    path, collection.num_grads, dim, dtype, resume.encode(entries, collection)
                )
                file.append(staging[known:good])
            if failure is not None:
                raise failure
    assert file is not None
    return file


def new_blocks(sizes: Sequence[int], block_size: int, device: torch.device) -> FisherBlocks:
    """Blocks of zeros over tensors of these lengths.

    Raises:
        MemoryError: they would not fit.
    """
    sizes = [size for size in sizes if size]
    dim = sum(sizes)
    needed = 8 * sum(run.count * run.length**2 for run in block_runs(dim, block_size, sizes))
    available = available_memory(device)
    if available is not None and needed > available:
        raise MemoryError(
            f"blocks of {block_size} over {dim} weights need {gib(needed)}, and {device} has {gib(available)} "
            f"available; what would fit: block_size={max(1, block_size * available // needed)}, or fewer params"
        )
    with torch.inference_mode(False):
        return FisherBlocks(dim, block_size, sizes, device=device)


def sum_blocks(collection: Collection, batches: Iterable[Batch], blocks: FisherBlocks) -> None:
    """Adds all rows to the blocks, some at a time."""
    layout = collection.layout
    count = max(1, min(ROWS_AT_ONCE, STAGING_BYTES // max(1, blocks.dim * layout.dtype.itemsize)))
    waiting = 0
    with evaluation(collection.model):
        staging = torch.empty(count, blocks.dim, dtype=layout.dtype, device=layout.device)
        for chunk in collection.chunks(passes(batches, collection.cycle)):
            if waiting + chunk.count > len(staging):
                blocks.add(staging[:waiting])
                waiting = 0
            if chunk.count > len(staging):
                staging = staging.new_empty(chunk.count, blocks.dim)
            collection.fill(chunk, staging[waiting : waiting + chunk.count])
            waiting += chunk.count
        blocks.add(staging[:waiting])


def _check_disk(path: Path, rows: int, row_bytes: int) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "out= needs a directory that exists", str(folder))
    needed, free = rows * row_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{rows} rows take {gib(needed)} and the disk has {gib(free)} left; collect fewer rows, or use "
            "dtype=torch.bfloat16, masks, or another disk",
            str(path),
        )

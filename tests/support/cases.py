"""Cases are data: seeded matrices of gradients, every way to build an operator on them, and modes of torch."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mfac
from mfac.windows.storage import as_kind


def mixed(m, d, norm=1.0, dtype=torch.float32, seed=0):
    """Rows of independent directions."""
    rows = torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (norm * rows / rows.norm(dim=1, keepdim=True)).to(dtype)


def repeating(m, d, norm=1.0, noise=0.01, dtype=torch.float32, seed=0):
    """Rows that nearly repeat one another."""
    rows = mixed(1, d, 1.0, torch.float64, seed) + noise * mixed(m, d, 1.0, torch.float64, seed + 1)
    return (norm * rows / rows.norm(dim=1, keepdim=True)).to(dtype)


def duplicates(m, d, norm=1.0, dtype=torch.float32):
    return mixed(1, d, norm, dtype).repeat(m, 1)


ROWS = {
    "ordinary": mixed(12, 40),
    "one row": mixed(1, 40),
    "more rows than weights": mixed(40, 12),
    "one weight": mixed(5, 1),
    "one of each": mixed(1, 1),
    "duplicate rows": duplicates(12, 40),
    "zero rows": mixed(12, 40) * (torch.arange(12) % 2)[:, None],
    "all zero": torch.zeros(12, 40),
    "nearly repeating": repeating(12, 40),
    "tiny": mixed(12, 40, 1e-6),
    "huge": mixed(12, 40, 1e3),
    "huge and repeating": repeating(12, 40, 1e3),
    "scales mixed": mixed(12, 40) * torch.logspace(-6, 3, 12)[:, None],
    "float64": mixed(12, 40, dtype=torch.float64),
    "float64 huge": mixed(12, 40, 1e3, dtype=torch.float64),
    "bfloat16": mixed(12, 40, dtype=torch.bfloat16),
    "float16": mixed(12, 40, dtype=torch.float16),
    "non-contiguous": mixed(40, 12).T,
}
DAMPINGS = [1e-8, 1e-5, 1e-1, 1e1]


@dataclass
class Built:
    """An operator, the rows it is exact for, and the blocks of F that it keeps (None: all)."""

    op: mfac.InverseFisher
    rows: Tensor
    blocks: list[tuple[int, int]] | None = None
    weights: Tensor | None = None


def spans(sizes, block_size):
    """Where blocks of `block_size` lie that never straddle two tensors."""
    found, start = [], 0
    for size in sizes:
        found += [(start + i, start + min(i + block_size, size)) for i in range(0, size, block_size)]
        start += size
    return found


def static(rows, damping, folder, block_size=None, disk=False, **options):
    """In memory or on disk; in blocks of two tensors, or of one on disk."""
    d = rows.shape[1]
    sizes = [d] if disk else [d - d // 3, d // 3]
    if block_size is not None:
        options |= {"block_size": block_size, "sizes": sizes}
    grads = write(rows, folder / "rows.mfac") if disk else rows.clone()
    blocks = None if block_size is None else spans(sizes, block_size)
    return Built(mfac.StaticInverseFisher(grads, damping, **options), rows, blocks)


def write(rows, path):
    file = mfac.GradientFile.create(path, *rows.shape, dtype=rows.dtype)
    file.append(rows)
    return file


def summed(rows, damping, folder):
    sums = mfac.FisherBlocks(rows.shape[1], 7)
    for part in rows.split(5):
        sums.add(part)
    return Built(mfac.StaticInverseFisher(sums, damping), rows, spans([rows.shape[1]], 7))


def weighted(rows, damping, folder, block_size=None):
    weights = torch.linspace(0, 2, len(rows), dtype=torch.float64, device="cpu")
    op = mfac.StaticInverseFisher(rows, damping, row_weights=weights, block_size=block_size)
    return Built(op, rows, block_size and spans([rows.shape[1]], block_size), weights)


def fill(op, rows):
    """A window into which these rows have gone, one after the other."""
    for row in rows:
        op.update(row)
    return op


def stored(rows, kind):
    """The storage of a window of this kind with these rows, and what they have become in it."""
    storage, written = as_kind(kind).build(*rows.shape, torch.device("cpu")), []
    for k, row in enumerate(rows):
        written.append(storage.encode(row))
        storage.write(k, written[-1])
    return storage, torch.stack([each.dense for each in written])


def dynamic(rows, damping, folder, window=None, laps=2.5, devices=("cpu",)):
    """A window that went round and was filled out of order, and holds just these rows at the end."""
    m, d = rows.shape
    answers = torch.float64 if rows.dtype == torch.float64 else torch.float32
    op = mfac.DynamicInverseFisher(m, d, damping, dtype=answers, window=window or rows.dtype, devices=devices)
    for i in range(int(laps * m)):
        op.update(rows[(7 * i) % m] * (1 + 0.5 * (i % 3)))
    for k in reversed(range(op.num_seen)):
        op.replace(k, rows[k])
    while op.num_seen < m:
        op.update(rows[op.num_seen])
    # What compressed rows read back as is checked in test_windows, against the literal formulas.
    return Built(op, op.rows if window else rows)


def half_full(rows, damping, folder):
    """A window with room left, dividing by its capacity: the same as weights of 1/m."""
    m, d = rows.shape
    answers = torch.float64 if rows.dtype == torch.float64 else torch.float32
    options = {"dtype": answers, "window": rows.dtype, "normalize": "full", "device": "cpu"}
    op = mfac.DynamicInverseFisher(2 * m, d, damping, **options)
    return Built(fill(op, rows), rows, weights=torch.tensor([0.5 / m] * m, dtype=torch.float64, device="cpu"))


OPERATORS: dict[str, Callable[[Tensor, float, Any], Built]] = {
    "full": static,
    "overwritten": partial(static, overwrite=True),
    "in float64": partial(static, precision="float64"),
    "blocks in the primal": partial(static, block_size=7),
    "blocks in the dual": partial(static, block_size=15),
    "blocks overwritten": partial(static, block_size=15, overwrite=True),
    "blocks paged": partial(static, block_size=4, page_size=9),
    "one weight a block": partial(static, block_size=1),
    "pages": partial(static, page_size=7),
    "one page": partial(static, page_size=1000),
    "disk": partial(static, disk=True, page_size=11),
    "blocks on disk": partial(static, disk=True, block_size=15, page_size=16),
    "summed blocks": summed,
    "weighted": weighted,
    "weighted blocks in the primal": partial(weighted, block_size=7),
    "weighted blocks in the dual": partial(weighted, block_size=15),
    "dynamic": dynamic,
    "dynamic, three devices": partial(dynamic, devices=["cpu", "cpu", "cpu"]),
    "dynamic, bfloat16 rows": partial(dynamic, window=torch.bfloat16),
    "dynamic, int8 rows": partial(dynamic, window=mfac.Int8(block=16), devices=["cpu", "cpu"]),
    "dynamic, top-k rows": partial(dynamic, window=mfac.TopK(0.2, block=16)),
    "dynamic, half full": half_full,
}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "float64 by default": partial(default_dtype, torch.float64),
    "another device by default": partial(torch.device, "meta"),
}

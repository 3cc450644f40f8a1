"""How much memory there is, asked before anything large is allocated; and large memory in large pages."""

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LARGE_PAGE = 1 << 21  # bytes, the usual one of the systems that have them
MADV_HUGEPAGE = 14  # of Linux's <asm/mman.h>


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, in large pages where the system has them.

    They are handed out in a fraction of the time when they are first written to, and passes over them are faster: a
    matrix of gradients has more small pages than the processor can keep the places of.
    """
    out = torch.empty(*shape, dtype=dtype, device=device)
    if device.type == "cpu" and out.nbytes >= LARGE_PAGE and (advise := _madvise()):
        start, stop = out.data_ptr() + LARGE_PAGE - 1, out.data_ptr() + out.nbytes
        first, last = (address // LARGE_PAGE * LARGE_PAGE for address in (start, stop))
        advise(ctypes.c_void_p(first), ctypes.c_size_t(max(0, last - first)), MADV_HUGEPAGE)  # may be ignored
    return out


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`, in large pages where the system has them."""
    return empty(*shape, dtype=dtype, device=device).zero_()


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def available_memory(device: torch.device | str | None = None) -> int | None:
    """Bytes that could be allocated on `device` now; None where there is no way to know."""
    device = torch.device("cpu" if device is None else device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_meminfo_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def gib(num_bytes: int) -> str:
    """A size for people: GiB from a tenth of one on, MiB below."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _cgroup_available() -> int | None:
    """What a container may still take; the page cache that it holds can be reclaimed, so it counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))

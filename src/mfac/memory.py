"""How much memory is available, asked before anything large is allocated."""

import re
from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated on `device` now; None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [limit for limit in (_meminfo_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def parse_bytes(size: int | str | None) -> int | None:
    """A number of bytes, or a text such as "4GB" or "512 MiB"; ValueError for anything else."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    match = re.fullmatch(r"(\d+\.?\d*)\s*([kMGT]?)(i?)B", size.strip()) if isinstance(size, str) else None
    if match is None or not float(match[1]):
        raise ValueError(f'memory must be a number of bytes or a text such as "4GB" or "512MiB", not {size!r}')
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2] or " "))


def gib(num_bytes: int) -> str:
    """A readable size: in GiB from a tenth of one on, in MiB below."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def is_count(value: object) -> bool:
    """Whether it is a positive int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_count(name: str, value: int) -> None:
    """Raises ValueError unless it is a positive int."""
    if not is_count(value):
        raise ValueError(f"{name} must be a positive int, not {value!r}")


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _cgroup_available() -> int | None:
    """Bytes left to a container; its page cache can be reclaimed and counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(statistics.get("inactive_file", 0))

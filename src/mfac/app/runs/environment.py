"""What a run was made on, and how much memory it took: facts that belong to every figure."""

import os
import platform
import resource
import sys
from pathlib import Path

import torch

from mfac import __version__


def environment(device: torch.device | str = "cpu") -> dict[str, object]:
    """Versions and the machine, for the record of a run."""
    return {
        "mfac": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "device": str(device),
    }


def process_peak_bytes() -> int:
    """The most memory that this process has held at any moment so far; a later cell never has less than an earlier."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())

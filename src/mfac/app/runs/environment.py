"""The machine of a run: its devices, its versions, and the memory that the process used."""

import os
import platform
import re
import resource
import sys
from pathlib import Path

import torch

from mfac import __version__


def choose_device(name: str) -> torch.device:
    """The device called "cpu", "cuda", "cuda:1" ...; ValueError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        others = "" if kind is None else f", {kind.type} (up to {torch.accelerator.device_count()} devices)"
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"device {name!r} cannot be used here ({reason}); available: cpu{others}") from None
    return device


def environment(device: torch.device | str = "cpu") -> dict[str, object]:
    """Versions and hardware, for the record of a run."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", path.read_text() if path.exists() else "", re.MULTILINE)
    return {
        "mfac": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": names[0].strip() if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "device": str(device),
    }


def process_peak_bytes() -> int:
    """The peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

"""How much the peak of this process rises while gradients are collected, in MiB: `python peak_memory.py mode`."""

import sys
from pathlib import Path

import torch
from models import cross_entropy
from torch import nn

from mfac.gradients import accumulate_fisher, collect_gradients

ROWS, WIDTH = 96, 700


def peak() -> float:
    """Not ru_maxrss, which a process inherits from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def rise(mode: str) -> float:
    torch.manual_seed(0)
    narrow, model = (nn.Sequential(nn.Linear(WIDTH, n), nn.ReLU(), nn.Linear(n, 10)) for n in (3, WIDTH))
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
    batches = [(inputs, targets)] if mode == "sample" else list(zip(inputs.split(1), targets.split(1), strict=True))
    # Modules are imported here; not for the model itself, since memory that its rows leave would hide those to come.
    collect_gradients(narrow, cross_entropy, batches, 2, per_sample=mode == "sample")
    before = peak()
    if mode == "blocks":
        accumulate_fisher(model, cross_entropy, batches, 4 * ROWS, 4, cycle=True)
    else:
        collect_gradients(model, cross_entropy, batches, ROWS, per_sample=mode == "sample")
    return peak() - before


if __name__ == "__main__":
    sys.stdout.write(str(rise(sys.argv[1])))

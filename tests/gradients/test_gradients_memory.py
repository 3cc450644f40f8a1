"""Peak memory, measured in a process of its own."""

from pathlib import Path

import pytest
import torch
from models import cross_entropy
from processes import in_process, peak
from torch import nn

from mfac.gradients import accumulate_fisher, collect_gradients

ROWS, WIDTH = 96, 700
ROW = 498_000 * 4 / 2**20


def measure(mode, path):
    """By how many MiB the peak of this process rises while gradients are collected."""
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
        collect_gradients(model, cross_entropy, batches, ROWS, per_sample=True)
    path.write_text(str(peak() - before))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("mode", "rows"),
    [("sample", 96 + 8), ("blocks", 4 * 32)],  # blocks: of 384 gradients, in chunks of 32
)
def test_the_rows_and_a_chunk(mode, rows, tmp_path):
    assert in_process(measure, mode, tmp_path / "rise") == 0
    assert float((tmp_path / "rise").read_text()) < rows * ROW

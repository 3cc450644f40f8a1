"""Peak memory, measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "peak_memory.py"
ROW = 498_000 * 4 / 2**20


def peak_rise(mode):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    return float(subprocess.check_output([sys.executable, str(SCRIPT), mode], env=environment, text=True))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("mode", "rows"),
    [("sample", 96 + 8), ("blocks", 4 * 32)],  # blocks: of 384 gradients, in chunks of 32
)
def test_the_rows_and_a_chunk(mode, rows):
    assert peak_rise(mode) < rows * ROW

"""Results are saved cell by cell, also when several runs share a file."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.ledger import Ledger

ROOT = Path(__file__).parents[2]


def test_a_cell_is_computed_once(tmp_path):
    assert Ledger("runs", "a command", tmp_path).cell("first", lambda: 1) == 1
    again = Ledger("runs", "a command", tmp_path)
    assert again.cell("first", lambda: pytest.fail("it was there")) == 1
    assert json.loads((tmp_path / "runs.json").read_text())["command"] == "a command"


def test_nothing_is_lost_between_runs_that_share_a_file(tmp_path):
    def add(name):
        ledger = Ledger("runs", "", tmp_path)
        for i in range(30):
            ledger.cell(f"{name}, {i}", lambda: "x" * 1000)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, "abcd"))
    cells = json.loads((tmp_path / "runs.json").read_text())["cells"]
    assert set(cells) == {f"{name}, {i}" for name in "abcd" for i in range(30)}
    assert [path.name for path in tmp_path.iterdir()] == ["runs.json"]


def test_a_folder_of_your_own(tmp_path):
    """Committed cells are not taken for measured ones there."""
    program = "from experiments.ledger import Ledger; ledger = Ledger('table2_small', 'x'); print(len(ledger.cells))"
    for folder, empty in ((None, False), (tmp_path / "anew", True)):
        added = {} if folder is None else {"MFAC_RESULTS": str(folder)}
        told = subprocess.run([sys.executable, "-c", program], env=os.environ | added, cwd=ROOT, capture_output=True)
        assert (int(told.stdout) == 0) is empty, told.stderr

"""Training that is killed and resumed, five times over: the same final weights, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interrupted_training import MARKS, STEPS

SCRIPT = Path(__file__).parents[1] / "support" / "interrupted_training.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs that are killed are forked")
def test_killed_five_times_and_resumed_the_final_weights_are_the_same_bits(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], env=environment, check=True)
    marks = json.loads((tmp_path / "marks.json").read_text())
    assert marks["whole"] == MARKS * STEPS
    assert marks["killed"] > MARKS * STEPS  # steps that were lost were taken again
    expected, weights = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "killed"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)

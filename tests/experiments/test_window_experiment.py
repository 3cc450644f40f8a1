"""The comparison of storages: steps beside an uncompressed run, and whole runs, saved so that they go on."""

import json

import pytest
import torch
from torch import nn

from experiments import ledger, windows
from experiments.optimizers import Task


@pytest.fixture
def task():
    """A convolution whose weights lie channels last, on noise."""
    images, labels = torch.randn(8, 3, 6, 6), torch.arange(8) % 4

    def model(seed):
        torch.manual_seed(seed)
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    return Task(model, lambda seed: iter([(images, labels)] * 20), lambda model: {"accuracy": 25.0}, 20, 10, 5, 20)


@pytest.fixture(autouse=True)
def _small(task, monkeypatch, tmp_path):
    monkeypatch.setitem(windows.SETTINGS, "cifar10", {"lr": 0.1, "num_grads": 4, "damping": 0.1, "weight_decay": 0.01})
    monkeypatch.setitem(windows.STEPS, "cifar10", 6)
    monkeypatch.setattr(windows, "build", lambda name: task)
    monkeypatch.setattr(windows, "Ledger", lambda name, command: ledger.Ledger(name, command, tmp_path))


def test_steps_beside_an_uncompressed_run_and_whole_runs_are_saved_and_told(capsys, tmp_path):
    windows.measure("cifar10", [1, 2])
    cells = json.loads((tmp_path / "windows_cifar10.json").read_text())["cells"]
    assert set(cells) == {"steps, seed 1", *(f"run, {key}, seed {n}" for key in windows.CHOSEN for n in (1, 2))}
    found = cells["steps, seed 1"]
    assert set(found) == set(windows.STORAGES) - {"float32"}
    assert all(len(record["cosines"]) == 6 and len(record["cosines_of_sums"]) == 2 for record in found.values())
    assert min(found["bfloat16"]["cosines"]) > 0.999
    assert min(found["int8"]["cosines"]) > 0.95
    assert max(found["top-k 1 %"]["cosines"]) < 0.9
    windows.table()
    told = capsys.readouterr().out
    assert all(f"cifar10, {key}, 2 seeds" in told for key in windows.CHOSEN)

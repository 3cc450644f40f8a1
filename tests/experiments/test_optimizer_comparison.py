"""The comparison of optimizers: searched, run and resumed; and the ten models, for a few steps each."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import mfac
from experiments import optimizers, ten_models, training, training_tasks, windows
from experiments.ledger import Ledger


def test_the_best_setting_is_run_and_its_record_thinned(monkeypatch, tmp_path):
    """Digits, 44 steps, with two settings of one optimizer, of which the first learns nothing."""
    task = training_tasks.digits()
    task = replace(task, steps=44, search_steps=22, seeds=1, test_every=11, search=replace(task.search, test_every=22))
    settings = {f"lr {lr:g}": partial(mfac.FullMatrixAdam, lr=lr) for lr in (0.0, 1e-2)}
    monkeypatch.setattr(optimizers, "TASKS", {"digits": (lambda: task, {"FullMatrixAdam": settings})})
    monkeypatch.setattr(optimizers, "Ledger", partial(Ledger, folder=tmp_path))
    monkeypatch.setattr(training, "RUNS", tmp_path / "runs")
    optimizers.compare("digits")
    cells = Ledger("optimizers_digits", "", tmp_path).cells
    run = cells["run, FullMatrixAdam, lr 0.01, seed 1"]
    assert (len(run["losses"]), len(run["seconds"]), len(run["tests"])) == (4, 4, 4)
    assert run["finished"]
    assert run["losses"][-1] < 0.8 * run["losses"][0]
    assert "run, FullMatrixAdam, lr 0, seed 1" not in cells


def test_a_cell_that_is_not_finished_is_computed_again(tmp_path):
    ledger, other = Ledger("some", "", tmp_path), Ledger("some", "", tmp_path)
    ledger.note("run", {"losses": [1.0], "partial": True})
    other.note("another", {})  # by a process that has an older copy of the first cell
    assert Ledger("some", "", tmp_path).cell("run", lambda: {"losses": [1.0, 0.5]}) == {"losses": [1.0, 0.5]}
    assert Ledger("some", "", tmp_path).cell("run", lambda: {}) == {"losses": [1.0, 0.5]}


@pytest.mark.parametrize(("best", "tries"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [1, 2, 3]), (4, [1, 2, 3, 4])])
def test_a_search_goes_on_while_the_best_is_at_an_end(best, tries):
    scores, seen = {str(i): abs(i - best) for i in range(5)}, set()
    assert optimizers.best_of(list(scores), lambda name: seen.add(name) or scores[name]) == str(best)
    assert sorted(map(int, seen)) == tries


def test_steps_to_a_mark_are_interpolated_and_a_setting_that_an_optimizer_does_not_have_is_refused():
    with pytest.raises(SystemExit, match="AdamW has no setting 'lr 7'"):
        optimizers.compare("digits", "AdamW", setting="lr 7")
    run = {"tests": [{"step": 10, "accuracy": 50.0}, {"step": 20, "accuracy": 90.0}]}
    assert optimizers.steps_to(run, 80.0) == 17.5


@pytest.mark.parametrize("name", ["MLP", "CNN, batch norm", "ViT", "regression", "autoencoder", "bfloat16"])
def test_models_without_texts_train(name, monkeypatch):
    monkeypatch.setattr(ten_models, "STEPS", 10)
    found = ten_models.train(name, mfac.FullMatrixAdam, 1)
    assert 0 < found["end"] < 1.1 * found["start"]


def test_steps_beside_an_uncompressed_run_and_whole_runs_are_saved_and_told(monkeypatch, capsys, tmp_path):
    """Of a convolution whose weights lie channels last, on noise."""
    images, labels = torch.randn(8, 3, 6, 6), torch.arange(8) % 4

    def model(seed):
        torch.manual_seed(seed)
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    batches = [(images, labels)] * 20
    task = optimizers.Task(model, lambda seed: iter(batches), lambda model: {"accuracy": 25.0}, 20, 10, 5, 20)
    monkeypatch.setitem(windows.SETTINGS, "cifar10", {"lr": 0.1, "num_grads": 4, "damping": 0.1, "weight_decay": 0.01})
    monkeypatch.setitem(windows.STEPS, "cifar10", 6)
    monkeypatch.setattr(windows, "build", lambda name: task)
    monkeypatch.setattr(windows, "Ledger", lambda name, command: Ledger(name, command, tmp_path))
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

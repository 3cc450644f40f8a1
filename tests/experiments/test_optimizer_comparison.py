"""The comparison of optimizers: searched, run and resumed; and the ten models, for a few steps each."""

from dataclasses import replace
from functools import partial

import pytest

import mfac
from experiments import optimizers, ten_models, training, training_tasks
from experiments.ledger import Ledger


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Digits, 44 steps, with two settings of one optimizer, of which the first learns nothing."""
    task = training_tasks.digits()
    task = replace(task, steps=44, search_steps=22, seeds=1, test_every=11, search=replace(task.search, test_every=22))
    settings = {f"lr {lr:g}": partial(mfac.FullMatrixAdam, lr=lr) for lr in (0.0, 1e-2)}
    monkeypatch.setattr(optimizers, "TASKS", {"digits": (lambda: task, {"FullMatrixAdam": settings})})
    monkeypatch.setattr(optimizers, "Ledger", partial(Ledger, folder=tmp_path))
    monkeypatch.setattr(training, "RUNS", tmp_path / "runs")
    return lambda: Ledger("optimizers_digits", "", tmp_path).cells


def test_the_best_setting_is_run_and_its_record_thinned(small):
    optimizers.compare("digits")
    run = small()["run, FullMatrixAdam, lr 0.01, seed 1"]
    assert (len(run["losses"]), len(run["seconds"]), len(run["tests"])) == (4, 4, 4)
    assert run["finished"]
    assert run["losses"][-1] < 0.8 * run["losses"][0]
    assert "run, FullMatrixAdam, lr 0, seed 1" not in small()


def test_a_cell_that_is_not_finished_is_computed_again(tmp_path):
    ledger, other = Ledger("some", "", tmp_path), Ledger("some", "", tmp_path)
    ledger.note("run", {"losses": [1.0], "partial": True})
    other.note("another", {})  # by a process that has an older copy of the first cell
    assert Ledger("some", "", tmp_path).cell("run", lambda: {"losses": [1.0, 0.5]}) == {"losses": [1.0, 0.5]}
    assert Ledger("some", "", tmp_path).cell("run", lambda: {}) == {"losses": [1.0, 0.5]}


def test_steps_to_a_mark_are_interpolated():
    run = {"tests": [{"step": 10, "accuracy": 50.0}, {"step": 20, "accuracy": 90.0}]}
    assert optimizers.steps_to(run, 80.0) == 17.5


@pytest.mark.parametrize("name", ["MLP", "CNN, batch norm", "ViT", "regression", "autoencoder", "bfloat16"])
def test_models_without_texts_train(name, monkeypatch):
    monkeypatch.setattr(ten_models, "STEPS", 10)
    found = ten_models.train(name, mfac.FullMatrixAdam, 1)
    assert 0 < found["end"] < 1.1 * found["start"]

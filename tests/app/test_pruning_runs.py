"""Runs that end with the same bits whether interrupted or not; pruning runs: the library's masks, complete records."""

import json
import signal
from dataclasses import replace

import pytest
import run_cases
import torch
from processes import in_process
from run_cases import GRADUAL, ONE_SHOT, TRAINING, StopAfter, data, loss, network, run, small_task, tensor_bytes
from torch import nn
from torch.utils.data import DataLoader

import mfac
from mfac.app.plan import plan_pruning
from mfac.app.runs.pruning import PruningSettings
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.training import OptimizerSettings
from mfac.app.tasks import load_task
from mfac.gradients.model_state import seeded
from mfac.pruning import PruningOptions

CPU, with_options, without_times = torch.device("cpu"), run_cases.with_options, run_cases.without_times
SETTINGS = {
    "several": replace(with_options(ONE_SHOT, (0.5, 0.8), recomputations=2), methods=("mfac", "magnitude")),
    "2:4": with_options(ONE_SHOT, (), pattern="2:4"),
    "rows, sampled labels": with_options(ONE_SHOT, (0.5,), pattern="row", fisher="sampled"),
    "samples": with_options(ONE_SHOT, per_sample=True, block_size=None, num_grads=64),
    "gradual, sgd": replace(GRADUAL, lr=0.05, schedule="polynomial"),
    **{
        f"training, {name}": replace(TRAINING, optimizers=(OptimizerSettings(name, num_grads=4, momentum=0.9),))
        for name in ("full-matrix-adam", "mfac", "adamw", "task")
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_interrupted_twice_it_ends_with_the_same_bits(tmp_path, name):
    settings = SETTINGS[name]
    loss_fn = mfac.criterion_loss(nn.CrossEntropyLoss())  # from which labels can be sampled
    task = small_task(loss=loss_fn, optimizer=lambda params: torch.optim.NAdam(params, lr=0.01))
    whole = run(tmp_path / "whole", settings, task)
    for calls in (10, 18):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", settings, task, watcher=StopAfter(calls))
    watcher = StopAfter()
    stopped = run(tmp_path / "stopped", settings, task, watcher=watcher)
    assert any("resuming after" in line for line in watcher.lines)
    assert tensor_bytes(tmp_path / "stopped") == tensor_bytes(tmp_path / "whole")
    assert without_times(stopped) == without_times(whole)
    assert not list(tmp_path.rglob("state.pt"))


def test_killed_it_ends_with_the_same_bits(tmp_path):
    assert in_process(run_cases.killed_run, tmp_path / "killed") == -signal.SIGKILL
    watcher = StopAfter()
    run(tmp_path / "killed", ONE_SHOT, watcher=watcher)
    assert any("resuming after" in line for line in watcher.lines)
    run(tmp_path / "whole", ONE_SHOT)
    assert tensor_bytes(tmp_path / "killed") == tensor_bytes(tmp_path / "whole")


@pytest.mark.parametrize("options", [{}, {"pattern": "2:4", "per_sample": True, "num_grads": 64}], ids=str)
def test_the_masks_are_those_of_the_library(tmp_path, options):
    settings = replace(with_options(ONE_SHOT, () if options else (0.9,), **options), seed=3)
    task = replace(load_task("digits"), pretrain=None)
    cell = run(tmp_path, settings, task)["cells"][0]
    with seeded(3):
        model = task.model()
    given = {"recomputations": 4, "num_grads": 8, "block_size": 16, **options}
    result = mfac.prune(model, task.loss, TaskBatches(task, CPU), cell["asked"], seed=3, progress=False, **given)
    masks = mfac.load_masks(tmp_path / cell["files"]["masks"])
    assert all(torch.equal(masks[name], result.masks[name]) for name in result.masks)
    mfac.load_compact(tmp_path / cell["files"]["compact"], other := task.model())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert [step["loss_after"] for step in cell["steps"]] == [record.loss_after for record in result.history]


@pytest.mark.parametrize("has_length", [True, False])
def test_a_step_takes_one_pass_at_most_as_in_the_library(tmp_path, has_length):
    images, labels = data()[:24]
    batches = [(images[i : i + 8], labels[i : i + 8]) for i in range(0, 24, 8)]
    task = small_task(model=lambda: network()[::2], train_batches=lambda: batches if has_length else iter(batches))
    cell = run(tmp_path, PruningSettings(PruningOptions(recomputations=3), sparsities=(0.8,)), task)["cells"][0]
    with seeded(0):
        model = task.model()
    result = mfac.prune(model, task.loss, batches, 0.8, recomputations=3, seed=0, progress=False)
    assert [step["loss_after"] for step in cell["steps"]] == [record.loss_after for record in result.history]
    assert plan_pruning(task, recomputations=3).gradients == 3 * 3  # 3 batches of 8 samples, though 256 are wanted


def test_gradual_pruning_without_training_makes_the_masks_of_the_library(tmp_path):
    task = small_task(optimizer=lambda params: torch.optim.SGD(params, lr=0.0), model=lambda: network()[::2])
    cell = run(tmp_path, GRADUAL, task)["cells"][0]
    with seeded(0):
        model = task.model()
    options = {"recomputations": 2, "num_grads": 8, "block_size": 16, "progress": False}
    pruner = mfac.GradualPruner(model, loss, TaskBatches(task, CPU), mfac.geometric_schedule(0.0, 0.8, 3), **options)
    while pruner.step() is not None:
        pass
    masks = mfac.load_masks(tmp_path / cell["files"]["masks"])
    assert all(torch.equal(masks[name], mask) for name, mask in pruner.masks.items())


def test_a_cell_is_complete_and_its_files_agree(tmp_path):
    record = run(tmp_path, ONE_SHOT)
    (cell,) = record["cells"]
    with seeded(0):
        assert record["dense"]["measure"] == accuracy_of(network())
    assert record["finished"] is not None
    assert record["model"] == {"weights": 8 * 16 + 16 + 2 * 16 + 16 * 4 + 4, "tensors": 6}
    assert round(cell["sparsity"] * 192) == round(0.8 * 192)
    assert sum(layer["weights"] for layer in cell["layers"]) == 192
    assert sum(layer["kept"] for layer in cell["layers"]) == 192 - round(0.8 * 192)
    assert cell["bytes"]["compact"] == (tmp_path / cell["files"]["compact"]).stat().st_size
    model, masks = network(), mfac.load_masks(tmp_path / cell["files"]["masks"])
    mfac.load_compact(tmp_path / cell["files"]["compact"], model)
    assert all(bool((model.get_parameter(name) == 0).eq(~mask).all()) for name, mask in masks.items())
    assert cell["measure"] == accuracy_of(model)
    assert json.loads((tmp_path / "run.json").read_text()) == record
    assert run(tmp_path, ONE_SHOT, watcher=StopAfter(1)) == record  # a finished run is not repeated


def accuracy_of(model):
    inputs, labels = data().tensors
    return float((model.eval()(inputs).argmax(1) == labels).double().mean())


def test_a_task_is_pretrained_once_for_all_cells(tmp_path):
    calls = []

    def pretrain(model):
        calls.append(1)
        with torch.no_grad():
            model[0].weight.normal_()

    loader = DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator())  # is seeded, too
    task = small_task(pretrain=pretrain, train_batches=lambda: loader)
    settings = replace(ONE_SHOT, sparsities=(0.5, 0.8))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, settings, task, watcher=StopAfter(7))
    run(tmp_path, settings, task)
    run(tmp_path / "other", replace(settings, checkpoint=str(tmp_path / "dense.safetensors")), task)
    assert len(calls) == 1
    ours, theirs = tensor_bytes(tmp_path / "other"), tensor_bytes(tmp_path)
    assert all(theirs[name] == content for name, content in ours.items())


def test_gradual_pruning_trains_between_its_steps_and_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    cell = run(tmp_path, GRADUAL, small_task(optimizer=lambda params: torch.optim.Adagrad(params, lr=0.05)))["cells"][0]
    assert torch.equal(torch.rand(3), expected)
    assert [entry["step"] for entry in cell["training"]] == list(range(1, 3 * 12 + 1))  # 3 steps of 12 batches
    assert len(cell["steps"]) == 3 * 2
    mfac.load_compact(tmp_path / cell["files"]["compact"], model := network())
    assert mfac.sparsity_report(model).removed == round(0.8 * 192)


def test_a_run_of_no_optimizer_is_refused_before_anything_is_written_and_one_that_diverges_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="give at least one optimizer, without repeats, not none"):
        run(tmp_path / "run", replace(TRAINING, optimizers=()))
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match=r"not finite at step .*--lr"):
        run(tmp_path, replace(GRADUAL, lr=1e30))

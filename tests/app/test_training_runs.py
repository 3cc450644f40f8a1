"""Training runs: complete records, and the same start and batches for all optimizers."""

import math
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch
from run_cases import TRAINING, StopAfter, data, loss, network, run, small_task, tensor_bytes
from torch import nn
from torch.utils.data import DataLoader

from mfac.app.runs.task_batches import TaskBatches, epochs
from mfac.app.runs.training import OptimizerSettings

CPU = torch.device("cpu")


def test_cells_are_complete_and_begin_with_the_same_weights_and_batches(tmp_path):
    record = run(tmp_path, replace(TRAINING, seeds=(0, 1)))
    cells = [(cell["optimizer"], cell["seed"]) for cell in record["cells"]]
    assert cells == [(name, seed) for seed in (0, 1) for name in ("full-matrix-adam", "adam")]
    first = [cell["losses"][0] for cell in record["cells"]]
    assert first[0] == first[1] != first[2] == first[3]
    for cell in record["cells"]:
        assert cell["steps"] == len(cell["losses"]) == len(cell["seconds"]) == 3 * 12
        assert all(before < after for before, after in pairwise(cell["seconds"]))
        assert [entry["step"] for entry in cell["evaluations"]] == [12, 24, 36]
        assert sum(cell["losses"][-12:]) < sum(cell["losses"][:12])
        assert (tmp_path / cell["files"]["weights"]).exists()
    assert record["cells"][0]["settings"] == OptimizerSettings("full-matrix-adam", num_grads=4).filled()
    assert record["settings"]["full-matrix-adam_num_grads"] == 4
    assert record["finished"] is not None


def test_plain_sgd_is_the_plain_loop(tmp_path):
    task = small_task(train_batches=lambda: DataLoader(data(), batch_size=8))
    sgd = OptimizerSettings("sgd", lr=0.1, momentum=0.5, weight_decay=0.01)
    cell = run(tmp_path, replace(TRAINING, optimizers=(sgd,), steps=20, epochs=5, schedule="cosine"), task)["cells"][0]
    torch.manual_seed(0)
    model = network()
    torch.manual_seed(0)  # for dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    losses = []
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * step / 20))
        batch = data()[8 * (step % 12) : 8 * (step % 12) + 8]
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert cell["losses"] == losses
    assert [entry["step"] for entry in cell["evaluations"]] == list(range(2, 21, 2))


def test_a_loss_that_is_not_finite_ends_the_cell_and_not_the_run(tmp_path):
    optimizers = (OptimizerSettings("sgd", lr=1e30), OptimizerSettings("adam"))
    watcher = StopAfter()
    first, second = run(tmp_path, replace(TRAINING, optimizers=optimizers), watcher=watcher)["cells"]
    assert first["losses"][-1] is None
    assert first["stopped"] == f"the loss was not finite at step {first['steps']}"
    assert any("try a lower learning rate" in line for line in watcher.lines)
    assert second["steps"] == 36
    assert "stopped" not in second


def test_evaluation_does_not_disturb_training(tmp_path):
    def evaluate(model):
        torch.rand(7)
        model.train()(torch.randn(8, 8))
        return 0.5

    with_it = run(tmp_path / "a", replace(TRAINING, eval_every=1), small_task(evaluate=evaluate))["cells"]
    without = run(tmp_path / "b", TRAINING)["cells"]
    assert [cell["losses"] for cell in with_it] == [cell["losses"] for cell in without]
    assert all(entry["measure"] == 0.5 for entry in with_it[0]["evaluations"])


def test_tied_weights_are_saved_once_and_loaded_again(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        model[2].weight = model[0].weight
        return model

    task = small_task(model=tied)
    settings = replace(TRAINING, optimizers=(OptimizerSettings("sgd"),), epochs=1)
    trained = run(tmp_path / "a", settings, task)["cells"][0]
    again = replace(settings, checkpoint=str(tmp_path / "a" / trained["files"]["weights"]), steps=1, epochs=5)
    assert len(tensor_bytes(tmp_path / "a")) == 1
    assert run(tmp_path / "b", again, task)["cells"][0]["losses"][0] < trained["losses"][0]


def test_batches_depend_on_seed_epoch_and_place_alone():
    batches = TaskBatches(small_task(), CPU)
    first, again, other = ([batch[0] for *_, batch in islice(epochs(batches, seed), 30)] for seed in (3, 3, 4))
    rest = [batch[0] for *_, batch in islice(epochs(batches, 3, epoch=1, skip=5), 13)]
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first[17:], rest))
    assert not any(map(torch.equal, first, other))
    assert not any(map(torch.equal, first[:12], first[12:]))


def test_batches_without_a_length_are_counted():
    assert len(TaskBatches(small_task(train_batches=lambda: iter(DataLoader(data(), 10))), CPU)) == 10
    empty = TaskBatches(small_task(train_batches=list), CPU)
    for draw in (lambda: len(empty), lambda: next(epochs(empty, 0))):
        with pytest.raises(ValueError, match=r"train_batches\(\) .*returned no batches; each call must return some"):
            draw()


def test_an_optimizer_of_the_task_without_the_weights_of_the_model_is_refused(tmp_path):
    task = small_task(optimizer=lambda _: torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1))
    with pytest.raises(ValueError, match="none of the 6 parameters of the model is in the optimizer"):
        run(tmp_path, replace(TRAINING, optimizers=(OptimizerSettings("task"),)), task)

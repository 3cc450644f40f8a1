"""Checkpoints to start from, and what is measured."""

import pytest
import torch
from run_cases import data, network, small_task
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.app.runs.checkpoint import load_checkpoint
from mfac.app.runs.environment import environment, process_peak_bytes
from mfac.app.runs.measures import measure
from mfac.app.runs.random_state import random_state, seeded, set_random_state

CPU = torch.device("cpu")


def save_torch(model, path):
    torch.save(model.state_dict(), path)


def save_nested(model, path):
    torch.save({"epoch": 3, "model_state_dict": model.state_dict()}, path)


def save_parallel(model, path):
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, path)


def save_safetensors(model, path):
    save_file(model.state_dict(), path)


def save_compactly(model, path):
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
    mfac.save_compact(model, path)


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (save_torch, "a.pt"),
        (save_nested, "a.ckpt"),
        (save_parallel, "a.pth"),
        (save_safetensors, "a.safetensors"),
        (save_compactly, "a.safetensors"),
    ],
)
def test_weights_come_back_from_every_kind_of_file(tmp_path, save, name):
    model, other = network(), network()
    save(model, tmp_path / name)
    load_checkpoint(tmp_path / name, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_checkpoint_of_another_shape_names_the_tensor(tmp_path):
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wide = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))
    save_torch(wide, tmp_path / "wide.pt")
    with pytest.raises(ValueError, match=r"'4.weight' has the shape \[5, 16\] in the file, and \[4, 16\] in the model"):
        load_checkpoint(tmp_path / "wide.pt", model)
    save_torch(nn.Sequential(nn.Linear(8, 16)), tmp_path / "short.pt")
    with pytest.raises(ValueError, match=r"it has no '1.weight' \(it has 0.weight, 0.bias\)"):
        load_checkpoint(tmp_path / "short.pt", model)
    save_torch(nn.Sequential(*network(), nn.Linear(4, 4)), tmp_path / "long.pt")
    with pytest.raises(ValueError, match=r"the model has no '5.weight' \(it has 0.weight, 0.bias, 1.weight \.\.\.\)"):
        load_checkpoint(tmp_path / "long.pt", model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    model = network()
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 no more")
    (tmp_path / "torn.safetensors").write_bytes(b"no more")
    torch.save(model, tmp_path / "whole_model.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, words in {
        "absent.pt": "there is no checkpoint",
        "torn.pt": "is not a whole file of torch.save",
        "torn.safetensors": "is not a whole safetensors file",
        "whole_model.pt": r"holds more than tensors.*save model.state_dict\(\)",
        "list.pt": "is no state_dict .* but a list",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_checkpoint(tmp_path / name, model)


def test_the_loss_is_a_mean_over_samples_and_accuracy_is_found_by_itself():
    task, model = small_task(), network()
    inputs, labels = data().tensors
    model.train()
    found = measure(task, model, CPU)
    assert model.training
    outputs = model.eval()(inputs)
    assert found.loss == pytest.approx(float(F.cross_entropy(outputs, labels).detach()), rel=1e-5)
    assert found.measure == float((outputs.argmax(1) == labels).double().mean())


def test_a_task_without_held_out_batches_has_a_loss_and_no_accuracy():
    found = measure(small_task(eval_batches=None), network(), CPU)
    assert found.loss is not None
    assert found.measure is None


@pytest.mark.parametrize("batch", [(torch.ones(4, 8), torch.ones(4, 3)), {"x": torch.ones(4, 8)}, torch.ones(4, 8)])
def test_batches_that_are_not_of_classes_have_no_accuracy(batch):
    task = small_task(loss=lambda model, batch: torch.tensor(2.0), eval_batches=lambda: [batch])
    found = measure(task, network(), CPU)
    assert (found.loss, found.measure) == (2.0, None)


def test_what_is_not_finite_is_no_number():
    task = small_task(loss=lambda model, batch: torch.tensor(float("nan")), evaluate=lambda model: float("inf"))
    found = measure(task, network(), CPU)
    assert (found.loss, found.measure) == (None, None)


def test_the_environment_has_what_a_report_shows():
    facts = environment("cpu")
    assert set(facts) == {"mfac", "torch", "python", "system", "processor", "threads", "memory_gib", "device"}
    assert facts["threads"] == torch.get_num_threads()
    before = process_peak_bytes()
    block = torch.ones(30_000_000)
    assert process_peak_bytes() >= max(before, block.numel() * 4)


def test_random_states_go_to_a_file_and_back(tmp_path):
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), float(torch.rand(()))

    torch.save(random_state(), tmp_path / "state.pt")
    first = draw()
    with seeded(5):
        inside = draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == first
    with seeded(5):
        assert draw() == inside

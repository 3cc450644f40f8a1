"""Checkpoints to start from, what is measured, and random states."""

import random

import numpy as np
import pytest
import torch
from run_cases import data, network, small_task
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.app.runs.environment import environment, process_peak_bytes
from mfac.app.runs.files import load_checkpoint
from mfac.app.runs.measures import measure
from mfac.gradients.model_state import random_state, seeded, set_random_state

CPU = torch.device("cpu")


def save_compactly(model, path):
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
    mfac.save_compact(model, path)


@pytest.mark.parametrize(
    ("save", "name"),
    [
        (lambda model, path: torch.save(model.state_dict(), path), "a.pt"),
        (lambda model, path: torch.save({"epoch": 3, "model_state_dict": model.state_dict()}, path), "a.ckpt"),
        (lambda model, path: torch.save(nn.DataParallel(model).state_dict(), path), "a.pth"),
        (lambda model, path: save_file(model.state_dict(), path), "a.safetensors"),
        (save_compactly, "a.safetensors"),
    ],
    ids=["state_dict", "nested", "parallel", "safetensors", "compact"],
)
def test_weights_come_back_from_every_kind_of_file(tmp_path, save, name):
    model, other = network(), network()
    save(model, tmp_path / name)
    load_checkpoint(tmp_path / name, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_file_that_is_no_checkpoint_of_the_model_is_refused(tmp_path):
    model = network()
    wide = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 5))
    torch.save(wide.state_dict(), tmp_path / "wide.pt")
    save_file(nn.Sequential(nn.Linear(8, 16)).state_dict(), tmp_path / "short.safetensors")
    torch.save(nn.Sequential(*network(), nn.Linear(4, 4)).state_dict(), tmp_path / "long.pt")
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 no more")
    (tmp_path / "torn.safetensors").write_bytes(b"no more")
    torch.save(model, tmp_path / "whole_model.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, words in {
        "wide.pt": r"does not fit the model: size mismatch for 4.weight: .*\[5, 16\].*\[4, 16\]",
        "short.safetensors": r"does not fit the model: .*issing key\(s\).*1.weight",
        "long.pt": r"does not fit the model: Unexpected key\(s\) .*5.weight",
        "absent.pt": "there is no checkpoint",
        "torn.pt": "is not a complete file of torch.save",
        "torn.safetensors": "is not a complete safetensors file",
        "whole_model.pt": r"contains more than tensors.*save model.state_dict\(\)",
        "list.pt": "holds a list and not a state_dict",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_checkpoint(tmp_path / name, model)


def test_the_loss_is_a_mean_over_samples_and_accuracy_is_the_default_measure():
    task, model = small_task(), network()
    inputs, labels = data().tensors
    model.train()
    found = measure(task, model, CPU)
    assert model.training
    outputs = model.eval()(inputs)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(outputs, labels).detach()), rel=1e-5)
    assert found["measure"] == float((outputs.argmax(1) == labels).double().mean())
    found = measure(small_task(eval_batches=None), network(), CPU)
    assert found["loss"] is not None
    assert found["measure"] is None


def test_what_cannot_be_measured_is_none():
    for batch in ((torch.ones(4, 8), torch.ones(4, 3)), {"x": torch.ones(4, 8)}, torch.ones(4, 8)):
        task = small_task(loss=lambda model, batch: torch.tensor(2.0), eval_batches=lambda batch=batch: [batch])
        assert measure(task, network(), CPU) == {"loss": 2.0, "measure": None}
    task = small_task(loss=lambda model, batch: torch.tensor(float("nan")), evaluate=lambda model: float("inf"))
    assert measure(task, network(), CPU) == {"loss": None, "measure": None}


def test_the_environment_has_what_a_report_shows():
    facts = environment("cpu")
    assert set(facts) == {"mfac", "torch", "python", "system", "processor", "threads", "memory_gib", "device"}
    before = process_peak_bytes()
    block = torch.ones(30_000_000)
    assert process_peak_bytes() >= max(before, block.numel() * 4)


def test_random_states_are_saved_and_restored(tmp_path):
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

"""The folder of a run and its files: complete at every moment, locked; checkpoints, measures and random states."""

import json
import random

import numpy as np
import pytest
import torch
from run_cases import data, full_disk, network, small_task
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.app.runs.environment import environment, process_peak_bytes
from mfac.app.runs.folder import load_checkpoint, open_run, read_run
from mfac.app.runs.task_batches import measure
from mfac.gradients.model_state import random_state, set_random_state

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

    # What cannot be measured is None.
    for batch in ((torch.ones(4, 8), torch.ones(4, 3)), {"x": torch.ones(4, 8)}, torch.ones(4, 8)):
        task = small_task(loss=lambda model, batch: torch.tensor(2.0), eval_batches=lambda batch=batch: [batch])
        assert measure(task, network(), CPU) == {"loss": 2.0, "measure": None}
    task = small_task(loss=lambda model, batch: torch.tensor(float("nan")), evaluate=lambda model: float("inf"))
    assert measure(task, network(), CPU) == {"loss": None, "measure": None}


def test_the_environment_has_what_a_report_shows():
    assert set(environment("cpu")) == {
        "mfac",
        "torch",
        "python",
        "system",
        "processor",
        "threads",
        "memory_gib",
        "device",
    }
    assert process_peak_bytes() > 1 << 26


def test_random_states_are_saved_and_restored(tmp_path):
    def draw():
        return random.random(), np.random.rand(), float(torch.rand(()))

    torch.save(random_state(), tmp_path / "state.pt")
    first = draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == first


CELL = {"label": "mfac", "method": "mfac", "asked": 0.9, "files": {"weights": "mfac-0.9/weights.safetensors"}}


def description(**changes):
    base = {
        "kind": "prune",
        "task": {"name": "small", "measure": "accuracy", "higher_is_better": True, "source": "small.py"},
        "model": {"weights": 10, "tensors": 2},
        "settings": {"sparsities": [0.9], "num_grads": 64},
        "digests": {"the task": "abc"},
    }
    return base | changes


def begin(path):
    with open_run(path, description()) as folder:
        folder.add(CELL)


def test_a_run_is_resumed_with_its_cells_and_its_start(tmp_path):
    begin(tmp_path / "run")
    before = read_run(tmp_path / "run")
    moved = {**description()["task"], "source": "../there/small.py"}  # the same file by another path
    with open_run(tmp_path / "run", description(task=moved)) as folder:
        assert folder.record == before
        assert folder.has(method="mfac", asked=0.9)
        assert not folder.has(method="mfac", asked=0.8)
        assert folder.record["finished"] is None
        folder.finish()
    after = read_run(tmp_path / "run" / "run.json")
    assert after["finished"] >= after["started"] == before["started"]


def test_the_folder_of_another_run_is_refused_with_the_difference(tmp_path):
    begin(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    for changes, words in (
        ({"settings": {"sparsities": [0.9], "num_grads": None}}, "num_grads was 64 and is now none"),
        ({"kind": "train"}, "the command was prune and is now train"),
        ({"model": {"weights": 11, "tensors": 2}}, "model weights was 10 and is now 11"),
    ):
        problem = f"holds another run: {words}; .*--out.*--fresh"
        with pytest.raises(ValueError, match=problem), open_run(tmp_path, description(**changes)):
            pass
    assert (tmp_path / "run.json").read_bytes() == before


def test_fresh_removes_the_files_of_the_run_and_no_others(tmp_path):
    with open_run(tmp_path, description()):
        pass
    with open_run(tmp_path, description(settings={})) as folder:  # a run without results is replaced
        folder.add(CELL)
    (tmp_path / "mfac-0.9").mkdir()
    for name in ("dense.safetensors", "report.html", "notes.txt", "mfac-0.9/weights.safetensors", "mfac-0.9/mine.txt"):
        (tmp_path / name).write_text("x")
    with open_run(tmp_path, description(), fresh=True) as folder:
        assert folder.record["cells"] == []
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {".lock", "run.json", "notes.txt", "mfac-0.9/mine.txt"}


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis.tex").write_text("x")
    for path, words in ((tmp_path, r"not a run folder \(it contains run\)"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(ValueError, match=words), open_run(path, description()):
            pass


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    begin(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with open_run(tmp_path, description()) as folder, full_disk(monkeypatch, after=1):
        with pytest.raises(OSError, match="No space left") as caught:
            folder.add({**CELL, "asked": 0.5})
        assert caught.value.filename == str(tmp_path / "run.json")
        assert folder.record["cells"] == json.loads(before)["cells"] == [CELL]
    assert (tmp_path / "run.json").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_is_no_record_is_refused(tmp_path):
    for content, words in {"{": "is not valid JSON", '{"format": 7}': "format 7; this", "[]": "list"}.items():
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ValueError, match=words):
            read_run(tmp_path)

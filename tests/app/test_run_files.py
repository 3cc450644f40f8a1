"""The folder of a run and its files: complete at every moment, locked; checkpoints, measures and random states."""

import json

import pytest
import report_cases as cases
import torch
from run_cases import ONE_SHOT, StopAfter, data, network, small_task
from safetensors.torch import save, save_file
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.app.report.page import write_page
from mfac.app.runs.folder import load_checkpoint, now, open_run, read_run
from mfac.app.runs.run import run_task
from mfac.app.runs.task_batches import measure

TORN = "is not a complete file of torch.save; copy or save it again"
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
        (lambda model, path: torch.save(nn.DataParallel(torch.compile(model)).state_dict(), path), "a.pth"),
        (lambda model, path: save_file(model.state_dict(), path), "a.safetensors"),
        (lambda model, path: save_file(torch.compile(model).state_dict(), path), "a.safetensors"),
        (save_compactly, "a.safetensors"),
    ],
    ids=["state_dict", "nested", "parallel", "compiled", "safetensors", "compiled safetensors", "compact"],
)
def test_weights_come_back_from_every_kind_of_file(tmp_path, save, name):
    model, other = network(), network()
    save(model, tmp_path / name)
    load_checkpoint(tmp_path / name, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("wide.pt", nn.Sequential(*network()[:-1], nn.Linear(16, 5)).state_dict(),
         r"does not fit the model: size mismatch for 4.weight: .*\[5, 16\].*\[4, 16\].*; it must be a state_dict"),
        ("long.pt", nn.Sequential(*network(), nn.Linear(4, 4)).state_dict(), r"does not fit .*Unexpected key.*5.w"),
        ("short.safetensors", save(nn.Linear(8, 16).state_dict()), r"does not fit .* Missing key\(s\).*1.weight"),
        ("model.pt", network(), r"contains more than tensors.*save model.state_dict\(\)"),
        ("list.pt", [1, 2], r"holds a list, not a state_dict; save model.state_dict\(\)"),
        ("torn.pt", b"PK\x03\x04 no more", TORN),
        ("text.pt", b"hello world\n", TORN),
        ("table.pt", b"epoch,loss\n1,2\n", TORN),
        ("empty.pt", b"", TORN),
        ("half.safetensors", save(network().state_dict())[:-9], "is not a complete safetensors file .*; copy or save"),
        ("absent.pt", None, "there is no checkpoint .*; expected a state_dict"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_checkpoint_of_the_model_is_refused(tmp_path, name, content, words):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} {words}" if content is not None else words):
        load_checkpoint(tmp_path / name, network())


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


CELL = cases.prune_cell("mfac", 0.9, 0.1, 0.9)
WRITTEN = ("format", "started", "finished", "cells")  # by the folder itself
DESCRIPTION = {key: value for key, value in cases.pruning().items() if key not in WRITTEN}


def begin(path, cell=CELL):
    with open_run(path, DESCRIPTION) as folder:
        folder.add(cell)


def test_a_run_is_resumed_with_its_cells_and_its_start(tmp_path):
    begin(tmp_path / "run")
    before = read_run(tmp_path / "run")
    moved = {**DESCRIPTION["task"], "source": "../there/small.py"}  # the same file by another path
    with open_run(tmp_path / "run", DESCRIPTION | {"task": moved}) as folder:
        assert folder.record == before
        assert folder.record["finished"] is None
        folder.put(finished=now())
    after = read_run(tmp_path / "run" / "run.json")
    assert after["finished"] >= after["started"] == before["started"]


def test_fresh_removes_the_files_of_the_run_and_no_others(tmp_path):
    with open_run(tmp_path, DESCRIPTION):
        pass
    with open_run(tmp_path, DESCRIPTION | {"settings": {}}) as folder:  # a run without results is replaced
        folder.add(CELL)
    (tmp_path / "mfac-0.9").mkdir()
    for name in ("dense.safetensors", "report.html", "notes.txt", "mfac-0.9/weights.safetensors", "mfac-0.9/mine.txt"):
        (tmp_path / name).write_text("x")
    with open_run(tmp_path, DESCRIPTION, fresh=True) as folder:
        assert folder.record["cells"] == []
        write_page([folder.record], tmp_path / "page.html")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"run.json", "notes.txt", "mfac-0.9/mine.txt", "report.html", "page.html"}  # not our report
    (tmp_path / "page.html").rename(tmp_path / "report.html")
    with open_run(tmp_path, DESCRIPTION, fresh=True):
        assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", [f"{way}/victim.txt" for way in ("..", "a/../..", "/{0}", "link")] + ["run.json"])
def test_what_is_outside_of_the_run_is_not_touched(tmp_path, name):
    victim, run = tmp_path / "victim.txt", tmp_path / "run"
    victim.write_text("mine")
    begin(run, CELL | {"files": {"weights": name.format(tmp_path)}})
    (run / "link").symlink_to(tmp_path)
    for fresh in (True, False):
        words = "outside of the run folder .*--out" if "victim" in name else "not in the cell's folder; restore it"
        with pytest.raises(ValueError, match=words), open_run(run, DESCRIPTION, fresh=fresh):
            pass
    assert victim.read_text() == "mine"
    assert (run / "run.json").exists()


@pytest.mark.parametrize("name", ["mfac-0.8", "mfac-0.8/state.pt", "dense.safetensors", "run.json", ".lock"])
def test_links_that_lead_out_of_the_run_are_not_followed(tmp_path, name):
    (tmp_path / "there").mkdir()
    victim = tmp_path / "there" / "state.pt"
    victim.write_text("mine")
    link = tmp_path / "run" / name
    if name != "run.json":
        begin(tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True, parents=True)
    link.symlink_to(victim.parent if name == "mfac-0.8" else victim)
    task = small_task(pretrain=lambda model: None)
    with pytest.raises(ValueError, match="outside of the run folder"):
        run_task(task, ONE_SHOT, tmp_path / "run", fresh=True)
    assert [path.name for path in victim.parent.iterdir()] == ["state.pt"]
    assert victim.read_text() == "mine"


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis.tex").write_text("x")
    for path, words in ((tmp_path, r"not a run folder \(it contains run\)"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(ValueError, match=words), open_run(path, DESCRIPTION):
            pass


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON .*; restore it, or run the command again"),
        ('{"format": 7}', r"expected the contents of a run.json of format 1, got \(7, None\)"),
        ("[]", "got list"),
        ({"finished": ...}, "run.json has no entry 'finished'; restore it, or run the command again in another folder"),
        ({"task": {}}, "run.json: task has no entry 'name'; restore it"),
        ({"cells": [CELL | {"bytes": None}]}, "run.json: cells 0: bytes must be of type dict, not None; restore it"),
        ({"kind": "train", "cells": [cases.train_cell("sgd", 0) | {"losses": []}]}, "losses is empty; restore it"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, content, words):
    if not isinstance(content, str):
        record = {key: value for key, value in (cases.pruning() | content).items() if value is not ...}
        content = json.dumps(record)
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_run(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "of another model"])
def test_a_state_that_is_not_of_the_cell_is_refused(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        run_task(small_task(), ONE_SHOT, tmp_path, watcher=StopAfter(12))
    state = tmp_path / "mfac-0.8" / "state.pt"
    if damage == "truncated":
        state.write_bytes(state.read_bytes()[:-100])
    else:
        torch.save({} if damage == "foreign" else {"model": {"x": torch.ones(3)}, "pruner": {}}, state)
    with pytest.raises(ValueError, match=r"mfac-0.8/state.pt is damaged, or not the state .*delete it, and the same"):
        run_task(small_task(), ONE_SHOT, tmp_path)
    state.unlink()
    assert run_task(small_task(), ONE_SHOT, tmp_path)["finished"]

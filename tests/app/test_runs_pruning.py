"""Pruning runs: the same masks whether they were interrupted or not, and everything that a cell should have."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from run_cases import GRADUAL, ONE_SHOT, StopAfter, data, full_disk, loss, network, small_task, start, tensor_bytes
from torch import nn
from torch.utils.data import DataLoader

import mfac
from mfac.app.runs.pruning_run import run_pruning
from mfac.app.runs.task_batches import CountedStream

HERE = Path(__file__).parents[1] / "support"


def run(folder, settings=ONE_SHOT, task=None, **options):
    return run_pruning(task or small_task(), settings, Path(folder), **options)


def without_times(record):
    text = json.loads(json.dumps(record))
    for key in ("started", "finished"):
        text.pop(key)
    for cell in text["cells"]:
        for key in ("seconds", "gradient_seconds", "peak_bytes"):
            cell.pop(key)
        for entry in cell["steps"] + cell["training"]:
            entry.pop("seconds", None)
            entry.pop("second", None)
    return text


SETTINGS = {
    "one-shot": ONE_SHOT,
    "several": replace(ONE_SHOT, methods=("mfac", "magnitude"), sparsities=(0.5, 0.8), recomputations=2),
    "layers": replace(ONE_SHOT, scope="layer", update="obs"),
    "2:4": replace(ONE_SHOT, sparsities=(), pattern="2:4"),
    "rows, drawn labels": replace(ONE_SHOT, sparsities=(0.5,), pattern="row", fisher="sampled"),
    "samples": replace(ONE_SHOT, per_sample=True, block_size=None, num_grads=64),
    "gradual": GRADUAL,
    "gradual, sgd": replace(GRADUAL, lr=0.05, schedule="polynomial"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_interrupted_twice_it_ends_with_the_same_bits(tmp_path, name):
    settings = SETTINGS[name]
    task = small_task(loss=mfac.criterion_loss(nn.CrossEntropyLoss()))  # which knows how labels are drawn
    whole = run(tmp_path / "whole", settings, task)
    for calls in (9, 14):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", settings, task, watcher=StopAfter(calls))
    watcher = StopAfter(-1)
    stopped = run(tmp_path / "stopped", settings, task, watcher=watcher)
    assert any("going on after" in line for line in watcher.lines)
    assert tensor_bytes(tmp_path / "stopped") == tensor_bytes(tmp_path / "whole")
    assert without_times(stopped) == without_times(whole)
    assert not list(tmp_path.rglob("state.pt"))


@pytest.mark.parametrize(("kind", "kills"), [("prune", (13, 3)), ("gradual", (5, 20))])
def test_killed_twice_it_ends_with_the_same_bits(tmp_path, kind, kills):
    for calls in kills:
        command = [sys.executable, "run_cases.py", kind, str(tmp_path / "killed"), str(calls)]
        assert subprocess.run(command, cwd=HERE, check=False).returncode == -signal.SIGKILL
    start(kind, tmp_path / "killed")
    start(kind, tmp_path / "whole")
    assert tensor_bytes(tmp_path / "killed") == tensor_bytes(tmp_path / "whole")


def test_one_recomputation_is_what_prune_does(tmp_path):
    record = run(tmp_path, replace(ONE_SHOT, recomputations=1, seed=3))
    torch.manual_seed(3)
    model = network()
    batches = DataLoader(data(), batch_size=8, shuffle=True)
    result = mfac.prune(model, loss, batches, 0.8, num_grads=8, block_size=16, recomputations=1, seed=3)
    masks = mfac.load_masks(tmp_path / "mfac-0.8" / "masks.safetensors")
    assert all(torch.equal(masks[name], result.masks[name]) for name in result.masks)
    assert record["cells"][0]["steps"][0]["loss_after"] == result.history[0].loss_after


def test_steps_keep_equal_fractions_as_those_of_prune_do(tmp_path):
    cell = run(tmp_path, ONE_SHOT)["cells"][0]
    model = network()
    result = mfac.prune(model, loss, DataLoader(data(), 8), 0.8, num_grads=8, block_size=16, recomputations=4)
    ours, theirs = [step["sparsity"] for step in cell["steps"]], [record.sparsity for record in result.history]
    assert ours == pytest.approx(theirs, abs=1.01 / result.num_weights)
    assert ours[-1] == theirs[-1] == cell["sparsity"]


def test_a_cell_has_everything_and_its_files_agree(tmp_path):
    record = run(tmp_path)
    (cell,) = record["cells"]
    assert record["finished"] is not None
    assert record["model"] == {"weights": 8 * 16 + 16 + 2 * 16 + 16 * 4 + 4, "tensors": 6}
    assert record["dense"]["measure"] == accuracy_of(small_network())
    assert round(cell["sparsity"] * 192) == round(0.8 * 192)
    assert sum(layer["weights"] for layer in cell["layers"]) == 192
    assert sum(layer["kept"] for layer in cell["layers"]) == 192 - round(0.8 * 192)
    assert cell["bytes"]["compact"] == (tmp_path / cell["files"]["compact"]).stat().st_size
    model, masks = network(), mfac.load_masks(tmp_path / cell["files"]["masks"])
    mfac.load_compact(tmp_path / cell["files"]["compact"], model)
    assert all(bool((model.get_parameter(name) == 0).eq(~mask).all()) for name, mask in masks.items())
    assert cell["measure"] == accuracy_of(model)
    assert json.loads((tmp_path / "run.json").read_text()) == record


def small_network():
    torch.manual_seed(0)
    return network()


def accuracy_of(model):
    inputs, labels = data().tensors
    return float((model.eval()(inputs).argmax(1) == labels).double().mean())


def test_a_finished_run_is_left_alone(tmp_path):
    first = run(tmp_path)
    assert run(tmp_path, watcher=StopAfter(1)) == first


def test_a_task_that_can_is_trained_once_for_all_cells(tmp_path):
    calls = []

    def pretrain(model):
        calls.append(1)
        with torch.no_grad():
            model[0].weight.normal_()

    settings = replace(ONE_SHOT, methods=("magnitude",), sparsities=(0.5, 0.8))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, settings, small_task(pretrain=pretrain), watcher=StopAfter(7))
    run(tmp_path, settings, small_task(pretrain=pretrain))
    assert len(calls) == 1
    dense = tmp_path / "dense.safetensors"
    other = replace(settings, checkpoint=str(dense))
    run(tmp_path / "other", other, small_task(pretrain=pretrain))
    assert len(calls) == 1
    ours, theirs = tensor_bytes(tmp_path / "other"), tensor_bytes(tmp_path)
    assert all(theirs[name] == content for name, content in ours.items())


def test_the_random_state_outside_is_left_alone(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    run(tmp_path, GRADUAL)
    assert torch.equal(torch.rand(3), expected)


def test_gradual_pruning_trains_by_the_tasks_optimizer(tmp_path):
    made = []

    def optimizer(params):
        made.append(torch.optim.Adagrad(params, lr=0.05))
        return made[-1]

    cell = run(tmp_path, GRADUAL, small_task(optimizer=optimizer))["cells"][0]
    assert len(made) == 1
    assert [entry["step"] for entry in cell["training"]] == list(range(1, 3 * 12 + 1))  # 3 steps of 12 batches
    assert len(cell["steps"]) == 3 * 2
    model = network()
    mfac.load_compact(tmp_path / cell["files"]["compact"], model)
    assert mfac.sparsity_report(model).removed == round(0.8 * 192)


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
    settings = replace(ONE_SHOT, sparsities=(0.5, 0.8))
    with full_disk(monkeypatch, after=14), pytest.raises(OSError, match="No space left"):
        run(tmp_path / "full", settings)
    assert len(json.loads((tmp_path / "full" / "run.json").read_text())["cells"]) == 1
    run(tmp_path / "full", settings)
    run(tmp_path / "whole", settings)
    assert tensor_bytes(tmp_path / "full") == tensor_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("magic",)}, "method must be one of mfac, .*, not 'magic'"),
        ({"methods": ("mfac", "mfac")}, "give one method or several, each once"),
        ({"sparsities": ()}, "give one sparsity or several, each once, not none"),
        ({"sparsities": (90,)}, "did you mean 0.9"),
        ({"sparsities": (0.9,), "pattern": "2:4"}, "has a sparsity of its own, 0.5; leave sparsity out"),
        ({"recomputations": 0}, "recomputations must be 1 or more, not 0"),
        ({"schedule": "hasty"}, "schedule must be one of geometric, polynomial"),
        ({"targets": ("9.weight",)}, "targets: '9.weight' matches no parameter"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here .*; there is cpu"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "run", replace(ONE_SHOT, **changes))
    assert not (tmp_path / "run").exists()


def test_training_that_diverges_between_steps_says_so(tmp_path):
    settings = replace(GRADUAL, lr=1e30)
    with pytest.raises(RuntimeError, match=r"not finite at step .*--lr"):
        run(tmp_path, settings)


def test_a_stream_taken_up_elsewhere_goes_on_with_the_same_batches():
    batches = DataLoader(data(), batch_size=8, shuffle=True)
    first = CountedStream(batches, 4)
    probes = first.peek(3)
    seen = [next(first) for _ in range(30)]
    second = CountedStream(batches, 4)
    second.resume_at(17, 3)
    for batch, other in zip(seen[17:], map(next, [second] * 13), strict=True):
        assert torch.equal(batch[0], other[0])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(probes, second.peek(3), strict=True))
    assert second.drawn == first.drawn == 30


def test_a_loader_with_a_generator_of_its_own_is_seeded_too(tmp_path):
    loader = DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator())
    make = partial(small_task, train_batches=lambda: loader)
    run(tmp_path / "a", ONE_SHOT, make())
    run(tmp_path / "b", ONE_SHOT, make())  # the generator has moved on
    assert tensor_bytes(tmp_path / "a") == tensor_bytes(tmp_path / "b")

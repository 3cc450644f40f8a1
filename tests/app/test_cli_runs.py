"""`mfac prune` and `mfac train`: results, resuming, and errors."""

import errno
import json
import os
import runpy
import signal
import sys

import pytest
import torch
from cli_cases import QUICK, TASK, mfac, write_task
from run_cases import full_disk, tensor_bytes
from safetensors.torch import load_file
from torch import nn

import mfac as library
from mfac.app.cli.display import ProgressDisplay
from mfac.app.runs.training import OptimizerSettings

TWO = ["--sparsity", 0.5, "--sparsity", 0.8, "--method", "mfac", "--method", "magnitude"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("mfac.app.cli.commands.write_page", lambda runs, path: path.write_text("<html>"))  # it is slow


def test_pruning_ends_with_a_table_files_and_a_report(tmp_path):
    task = write_task(tmp_path)
    result = mfac("prune", task, *TWO, *QUICK)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["method", "sparsity", "loss", "accuracy", "seconds", "compact", "file"]
    assert [line.split()[0] for line in lines[1:6]] == ["dense", "mfac", "mfac", "magnitude", "magnitude"]
    assert lines[6] == "Report: runs/small-prune/report.html"
    folder = tmp_path / "runs" / "small-prune"
    assert "<html" in (folder / "report.html").read_text()
    record = json.loads((folder / "run.json").read_text())
    assert [cell["asked"] for cell in record["cells"]] == [0.5, 0.8, 0.5, 0.8]
    masks = library.load_masks(folder / "mfac-0.8" / "masks.safetensors")
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.8 * 192)
    again = mfac("prune", task, *TWO, *QUICK)
    assert again.stdout.splitlines() == ["runs/small-prune is already finished; --fresh starts it over.", *lines]
    refused = mfac("prune", task, "--sparsity", 0.8, *QUICK)
    assert refused.exit_code == 1
    assert refused.stderr == (
        "mfac: runs/small-prune holds another run: methods was mfac, magnitude and is now mfac; "
        "sparsities was 0.5, 0.8 and is now 0.8; choose another folder (--out), or start this one over (--fresh)\n"
    )
    assert mfac("prune", task, "--sparsity", 0.8, "--fresh", *QUICK).exit_code == 0
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["mfac-0.8"]
    write_task(tmp_path, TASK + "\n# changed\n")
    assert "the content of the task was" in mfac("prune", task, "--sparsity", 0.8, *QUICK).stderr


def test_json_is_one_object_with_the_command_to_repeat(tmp_path):
    chatty = TASK.replace("def model():", "print('loading')\n\n\ndef model():\n    print('a model')")
    task = write_task(tmp_path, chatty, name="a task.py")
    result = mfac("prune", task, "--pattern", "2:4", "--per-sample", "--json", *QUICK, "--out", "o")
    record = json.loads(result.stdout)
    assert result.stderr.startswith("loading\na model\n")
    assert (record["folder"], record["report"]) == ("o", "o/report.html")
    quick = " ".join(map(str, QUICK))
    assert record["command"] == f"mfac prune '{task}' --pattern 2:4 {quick} --per-sample --out o"
    assert record["cells"][0]["asked"] == record["cells"][0]["sparsity"] == 0.5
    assert record["settings"]["per_sample"] is True
    options = [*QUICK, "--block-size", "none", "--damping", "auto", "--gradual", "--steps", 2, "--lr", 0.05]
    record = json.loads(mfac("prune", task, "--json", *options, "--target", "0.weight", "--out", "p").stdout)
    settings = record["settings"]
    assert (settings["block_size"], settings["damping"], settings["lr"]) == (None, "auto", 0.05)
    assert settings["targets"] == ["0.weight"]
    assert (record["cells"][0]["asked"], len(record["cells"][0]["training"])) == (0.9, 2 * 12)


def test_update_none_leaves_the_remaining_weights_as_they_are(tmp_path):
    """Here "none" is one of the updates; of `--block-size` it is the full matrix."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.save(model.state_dict(), "dense.pt")
    options = ["--checkpoint", "dense.pt", "--update", "none", "--sparsity", 0.5, *QUICK, "--json"]
    record = json.loads(mfac("prune", write_task(tmp_path), *options).stdout)
    assert record["settings"]["update"] == "none"
    folder = tmp_path / record["folder"] / "mfac-0.5"
    masks, pruned = library.load_masks(folder / "masks.safetensors"), load_file(folder / "weights.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(pruned[name], weight * masks.get(name, True))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["prune", "--sparsity", "1.5"], 1, "sparsity is the fraction of zeros, a number from 0 to 1"),
        (["prune", "--sparsity", "0.9", "--pattern", "2:4"], 1, "implies a sparsity of 0.5; omit the sparsity"),
        (["prune", "--gradual", "--epochs", "0"], 1, "epochs must be 1 or more, not 0"),
        (["prune", "--method", "magic"], 2, "'magic' is not one of mfac, magnitude, diagonal"),
        (["prune", "--target", "9.weight"], 1, "targets: '9.weight' matches no parameter of the model"),
        (["prune", "--device", "abacus"], 1, "device 'abacus' cannot be used here"),
        (["prune", "--checkpoint", "other.pt"], 1, "other.pt does not fit the model: size mismatch for 2.weight"),
        (["prune", "--sparsity", "0.5", "--sparsity", "0.5"], 1, "give at least one sparsity, without repeats"),
        (["prune", "--epochs", "2", "--lr", "0.1"], 1, "epochs, lr: only for gradual pruning; add --gradual"),
        (["prune", "--gradual", "--lr", "nan"], 1, "lr must be finite, not nan"),
        (["prune", "--gradual", "--pattern", "2:4", "--steps", "3"], 1, "steps: an N:M pattern is pruned in one step"),
        (["prune", "--seed", "-1"], 2, "greater than or equal to 0"),
        (["train", "--steps", "3", "--epochs", "2"], 1, "epochs: give either steps or epochs"),
        (["plan", "--on-disk"], 1, "rows_dir keeps the gradients on disk, which needs a block_size"),
        (["train", "--window", "int4"], 1, "window must be one of float32, float64, bfloat16, float16, int8"),
        (["train", "--damping", "fast"], 2, "'fast' is not a number"),
        (["train", "--lr", "adam=0.1"], 2, "adam is not one of full-matrix-adam, adamw"),
        (["train", "--optimizer", "task"], 1, "the task small defines no optimizer"),
        (["train", "--num-grads", "100000000"], 1, "GiB"),
        (["train", "--num-grads", "adamw=5"], 2, "adamw has no such option"),
        (["plan", "--train", "--steps", "0"], 1, "steps must be a positive int, not 0"),
        (["plan", "--window", "int8"], 2, "applies only with --train"),
        (["plan", "--sparsity", "1"], 1, "sparsity must be between 0 and 1"),
        (["report", "absent"], 1, "absent is not a run folder (it has no run.json); `mfac prune`"),
    ],
)
def test_wrong_arguments_are_reported_and_nothing_is_written(tmp_path, arguments, code, words):
    torch.save(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).state_dict(), "other.pt")
    write_task(tmp_path)
    command, *rest = arguments
    result = mfac(command, *([] if command == "report" else ["small.py"]), *rest)
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert code == 2 or len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_line_with_a_remedy(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    task = write_task(tmp_path)
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    line = mfac("prune", task, "--out", "theirs", *QUICK).stderr
    assert line.startswith("mfac: theirs: Permission denied; change its permissions, or choose another place")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def model(:\n", "small.py:1: SyntaxError"),
        (TASK.replace("nn.Linear(8, 16)", "nn.Linear(8, 'wide')"), "small.py:9: model() failed: TypeError"),
        (TASK.replace("nn.Linear(8, 16)", "nn.Linear(9, 16)"), "small.py:21)"),
        (TASK.replace("batch[1])", "batch[1], reduction='none')"),
         "small.py: loss(model, batch) must return a scalar tensor, not one of shape [32]; return the mean over the"),
        (TASK.replace("batch[1])", "batch[1]).item()"),
         "small.py: loss(model, batch) must return a scalar tensor, not a float"),
        (TASK.replace("batch[1])", "batch[1]).detach()"), "the loss does not depend on any trainable parameter"),
    ],
    ids=range(6),
)  # fmt: skip
def test_an_error_in_a_task_is_one_line_with_its_place(tmp_path, text, words):
    write_task(tmp_path, text)
    for command in ("prune", "train", "plan"):
        result = mfac(command, "small.py", "--num-grads", 8)
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert words.replace("32", "32" if command == "prune" else "8") in result.stderr
    assert isinstance(mfac("prune", "small.py", "--debug").exception, Exception)


def test_a_full_disk_is_one_line_and_the_same_command_resumes(tmp_path, monkeypatch):
    command = ["prune", write_task(tmp_path), "--sparsity", 0.5, "--sparsity", 0.8, *QUICK]
    with full_disk(monkeypatch, after=11):
        result = mfac(*command)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("mfac: ")]
    assert line.startswith("mfac: the disk is full (runs/small-prune/")
    assert "free some space and run the same command again" in line
    assert mfac(*command).exit_code == 0
    mfac(*command, "--out", "whole")
    assert tensor_bytes(tmp_path / "runs" / "small-prune") == tensor_bytes(tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_locked_and_resumed_to_the_bit(tmp_path, monkeypatch, capsys, number, code):
    command = ["prune", write_task(tmp_path), "--sparsity", 0.5, "--sparsity", 0.8, *QUICK]
    folder, refused = tmp_path / "runs" / "small-prune", []

    def at(display, done, note=""):
        if (folder / "mfac-0.8" / "state.pt").exists():  # the first cell is complete, the second has one step
            refused.append(mfac(*command))
            signal.raise_signal(number)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background is started without
    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "at", at)
        patch.setattr(sys, "argv", ["mfac", *map(str, command)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("mfac", run_name="__main__")
    for each, handler in before.items():
        signal.signal(each, handler)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert err.splitlines()[-1] == (
        f"mfac: {'interrupted' if code == 130 else 'terminated'}; results so far are in runs/small-prune "
        "(runs/small-prune/report.html); the same command resumes the run"
    )
    assert refused[0].exit_code == 1
    assert " is writing to runs/small-prune; wait for it" in refused[0].stderr
    assert len(json.loads((folder / "run.json").read_text())["cells"]) == 1
    result = mfac(*command)
    assert result.exit_code == 0
    assert "mfac-0.8: resuming after" in result.stderr
    assert "mfac-0.5" not in result.stderr
    mfac(*command, "--out", "whole")
    assert tensor_bytes(folder) == tensor_bytes(tmp_path / "whole")


def test_training_ends_with_a_table_weights_and_a_report(tmp_path):
    names = ("full-matrix-adam", "full-matrix-adam-orthogonalized", "mfac", "sgd", "adam", "adamw")
    optimizers = [word for name in names for word in ("--optimizer", name)]
    result = mfac("train", write_task(tmp_path), *optimizers, "--seed", 0, "--seed", 1, "--epochs", 1)
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["optimizer", "seed", "steps", "training", "loss", "loss", "accuracy", "seconds"]
    assert [line.split()[:3] for line in lines[1:13]] == [[name, seed, "12"] for seed in "01" for name in names]
    assert lines[13] == "Report: runs/small-train/report.html"
    assert len(tensor_bytes(tmp_path / "runs" / "small-train")) == 12 * 4


def test_settings_of_training_go_to_all_optimizers_or_to_one(tmp_path):
    options = ["--optimizer", "mfac", "--optimizer", "sgd", "--lr", "sgd=0.2", "--lr", "0.01", "--momentum", "mfac=0.5"]
    options += ["--weight-decay", "1e-3", "--damping", 0.3, "--num-grads", 5, "--normalize", "sum", "--window", "int8"]
    options += ["--steps", 3, "--schedule", "constant", "--json"]
    record = json.loads(mfac("train", write_task(tmp_path), *options).stdout)
    ours, sgd = (cell["settings"] for cell in record["cells"])
    shared, rows = {"lr": 0.01, "weight_decay": 1e-3}, {"num_grads": 5, "window": "int8", "normalize": "sum"}
    assert ours == {**shared, **rows, "damping": 0.3, "momentum": 0.5}
    assert sgd == {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3}
    assert record["settings"]["schedule"] == "constant"
    assert [cell["steps"] for cell in record["cells"]] == [3, 3]
    assert OptimizerSettings("full-matrix-adam").filled()["lr"] == 3e-3  # the defaults are those of the class

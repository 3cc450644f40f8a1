"""`mfac train`: side by side, by name, and going on."""

import json
import signal
import time

import pytest
from cli_cases import TASK, mfac, start, write_task
from run_cases import tensor_bytes


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_optimizers_and_seeds_make_a_table_weights_and_a_page(tmp_path):
    optimizers = [word for name in ("mfac", "sgd", "adam", "adamw") for word in ("--optimizer", name)]
    result = mfac("train", write_task(tmp_path), *optimizers, "--seed", 0, "--seed", 1, "--epochs", 1)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["optimizer", "seed", "steps", "training", "loss", "loss", "accuracy", "seconds"]
    assert [line.split()[:3] for line in lines[1:9]] == [
        [name, seed, "12"] for seed in "01" for name in ("mfac", "sgd", "adam", "adamw")
    ]
    assert lines[9] == "The page: runs/small-train/report.html"
    assert len(tensor_bytes(tmp_path / "runs" / "small-train")) == 8 * 4


def test_settings_go_to_all_or_to_one_by_name(tmp_path):
    task = write_task(tmp_path)
    options = [
        "--lr",
        "sgd=0.2",
        "--lr",
        "0.01",
        "--momentum",
        "mfac=0.5",
        "--weight-decay",
        "1e-3",
        "--damping",
        "0.3",
    ]
    result = mfac("train", task, *options, "--num-grads", 5, "--steps", 3, "--schedule", "constant", "--json")
    record = json.loads(result.stdout)
    ours, sgd = (cell["settings"] for cell in record["cells"])
    assert ours == {
        "lr": 0.01, "num_grads": 5, "damping": 0.3, "momentum": 0.5, "weight_decay": 1e-3, "window": "float32"
    }  # fmt: skip
    assert sgd == {"lr": 0.2, "momentum": 0.9, "weight_decay": 1e-3}
    assert record["settings"]["schedule"] == "constant"
    assert [cell["steps"] for cell in record["cells"]] == [3, 3]


@pytest.mark.parametrize("window", ["bfloat16", "int8", "topk"])
def test_the_window_is_stored_as_asked(tmp_path, window):
    options = ["--optimizer", "mfac", "--num-grads", 4, "--steps", 6, "--window", window, "--json"]
    cells = json.loads(mfac("train", write_task(tmp_path), *options).stdout)["cells"]
    assert cells[0]["settings"]["window"] == window
    assert len(cells[0]["losses"]) == 6


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--window", "int4"], 2, "'int4' is not one of float32, float64, bfloat16, float16, int8, topk"),
        (["--lr", "fast"], 2, "'fast' is no number"),
        (["--lr", "adam=0.1"], 2, "adam is none of mfac, sgd"),
        (["--optimizer", "sophia"], 2, "'sophia' is not one of mfac, sgd, adam, adamw, task"),
        (["--schedule", "hope"], 2, "'hope' is not one of cosine, constant"),
        (["--optimizer", "task"], 1, "the task small defines no optimizer"),
        (["--lr", "-1"], 1, "lr must be 0 or more"),
        (["--num-grads", "100000000"], 1, "GiB"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.setenv("COLUMNS", "200")
    result = mfac("train", write_task(tmp_path), *arguments)
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


def test_interrupted_in_mid_training_it_goes_on_to_the_same_bits(tmp_path):
    slow = TASK.replace("return F.cross_entropy", "__import__('time').sleep(0.01); return F.cross_entropy")
    command = ["train", write_task(tmp_path, slow), "--optimizer", "mfac", "--epochs", 5, "--save-every", 0]
    process = start(*command, cwd=tmp_path)
    folder = tmp_path / "runs" / "small-train"
    deadline = time.monotonic() + 60
    while not (folder / "mfac-seed0" / "state.pt").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert (
        err == f"mfac: interrupted; what is done is kept in {folder.relative_to(tmp_path)}; the same command goes on\n"
    )
    result = mfac(*command)
    assert "mfac-seed0: going on after step" in result.stderr
    mfac(*command, "--out", "whole")
    assert tensor_bytes(folder) == tensor_bytes(tmp_path / "whole")

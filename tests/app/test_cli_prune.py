"""`mfac prune`: results, going on, and what is said when something is wrong."""

import json
import signal
import time

import pytest
import torch
from cli_cases import QUICK, TASK, mfac, start, write_task
from run_cases import full_disk, tensor_bytes
from torch import nn

import mfac as library


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_methods_and_sparsities_make_a_table_files_and_a_page(tmp_path):
    task = write_task(tmp_path)
    result = mfac(
        "prune", task, "--sparsity", 0.5, "--sparsity", 0.8, "--method", "mfac", "--method", "magnitude", *QUICK
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["method", "sparsity", "loss", "accuracy", "seconds", "compact", "file"]
    assert [line.split()[0] for line in lines[1:6]] == ["dense", "mfac", "mfac", "magnitude", "magnitude"]
    assert lines[6] == "The page: runs/small-prune/report.html"
    folder = tmp_path / "runs" / "small-prune"
    assert "<html" in (folder / "report.html").read_text()
    record = json.loads((folder / "run.json").read_text())
    assert [(cell["method"], cell["asked"]) for cell in record["cells"]] == [
        ("mfac", 0.5), ("mfac", 0.8), ("magnitude", 0.5), ("magnitude", 0.8)
    ]  # fmt: skip
    assert "--sparsity 0.5 --sparsity 0.8 --method mfac --method magnitude" in record["command"]
    masks = library.load_masks(folder / "mfac-0.8" / "masks.safetensors")
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.8 * 192)
    again = mfac(
        "prune", task, "--sparsity", 0.5, "--sparsity", 0.8, "--method", "mfac", "--method", "magnitude", *QUICK
    )
    assert again.exit_code == 0
    assert again.stdout.splitlines() == ["runs/small-prune is finished already; --fresh starts it over.", *lines]


def test_the_command_of_the_record_is_one_that_can_be_given_again(tmp_path):
    task = write_task(tmp_path, name="a task.py")
    mfac("prune", task, "--pattern", "2:4", "--per-sample", "--json", *QUICK, "--out", "o")
    record = json.loads((tmp_path / "o" / "run.json").read_text())
    assert record["command"] == (
        f"mfac prune '{task}' --pattern 2:4 --recomputations 2 --num-grads 8 --block-size 16 --per-sample --out o"
    )
    assert record["cells"][0]["asked"] == record["cells"][0]["sparsity"] == 0.5
    assert record["settings"]["per_sample"] is True


def test_json_is_one_object_and_all_of_stdout(tmp_path):
    result = mfac("prune", write_task(tmp_path), "--json", *QUICK, "--block-size", "none", "--damping", "auto")
    record = json.loads(result.stdout)
    assert (record["folder"], record["report"]) == ("runs/small-prune", "runs/small-prune/report.html")
    assert record["settings"]["block_size"] is None
    assert record["settings"]["damping"] == "auto"
    assert record["cells"][0]["asked"] == 0.9


def test_gradual_pruning_has_its_training_in_the_record(tmp_path):
    result = mfac("prune", write_task(tmp_path), "--gradual", "--steps", 2, "--lr", 0.05, "--json", *QUICK)
    record = json.loads(result.stdout)
    assert len(record["cells"][0]["training"]) == 2 * 12
    assert record["settings"]["lr"] == 0.05


def test_fresh_starts_over_and_another_run_is_refused(tmp_path):
    task = write_task(tmp_path)
    assert mfac("prune", task, "--sparsity", 0.5, *QUICK).exit_code == 0
    refused = mfac("prune", task, "--sparsity", 0.8, *QUICK)
    assert refused.exit_code == 1
    assert refused.stderr == (
        "mfac: runs/small-prune is the folder of another run: sparsities was 0.5 and is now 0.8; "
        "choose another folder (--out), or start this one over (--fresh)\n"
    )
    assert mfac("prune", task, "--sparsity", 0.8, "--fresh", *QUICK).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "runs" / "small-prune").iterdir() if path.is_dir()) == ["mfac-0.8"]
    write_task(tmp_path, TASK + "\n# changed\n")
    refused = mfac("prune", task, "--sparsity", 0.8, *QUICK)
    assert refused.exit_code == 1
    assert "the content of the task was" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sparsity", "1.5"], "--sparsity"),
        (["--sparsity", "most"], "--sparsity"),
        (["--method", "magic"], "'magic' is not one of mfac, magnitude"),
        (["--block-size", "0"], "'0' is neither a number of weights nor none"),
        (["--damping", "-1"], "'-1' is neither a positive number nor auto"),
        (["--update", "hope"], "'hope' is not one of joint, obs, none"),
        (["--num-grads", "0"], "--num-grads"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_usage_has_exit_code_2_and_writes_nothing(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setenv("COLUMNS", "200")
    result = mfac("prune", write_task(tmp_path), *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "9.weight"], "targets: '9.weight' matches no parameter of the model"),
        (["--pattern", "2:5"], "5 must divide it"),
        (["--pattern", "stripes"], "stripes"),
        (["--device", "abacus"], "device 'abacus' cannot be used here"),
        (["--checkpoint", "absent.pt"], "there is no checkpoint absent.pt"),
        (["--sparsity", "0.5", "--sparsity", "0.5"], "give one sparsity or several, each once"),
        (["--pattern", "2:4", "--sparsity", "0.9"], "has a sparsity of its own, 0.5"),
        (["--method", "diagonal", "--damping", "auto"], "give method 'diagonal' a number"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_1(tmp_path, arguments, words):
    result = mfac("prune", write_task(tmp_path), *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "Traceback" not in result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("mfac: ")]
    assert len(told) == 1


def test_a_checkpoint_of_another_shape_names_the_tensor(tmp_path):
    torch.save(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).state_dict(), "other.pt")
    result = mfac("prune", write_task(tmp_path), "--checkpoint", "other.pt", *QUICK)
    assert result.exit_code == 1
    assert result.stderr == (
        "mfac: other.pt does not fit the model: '2.weight' has the shape [5, 16] in the file, "
        "and [4, 16] in the model\n"
    )


def test_a_missing_data_set_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "nothing"))
    result = mfac("prune", "experiments.tasks.mnist")
    assert result.exit_code == 1
    assert "`python -m experiments.datasets mnist`" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def model(:\n", "small.py:1: SyntaxError"),
        ("import not_there\n", "small.py:1: importing it failed: ModuleNotFoundError"),
        ("def model():\n    pass\n", r"must define train_batches() and loss(model, batch)"),
        (TASK.replace("nn.Linear(8, 16)", "nn.Linear(8, 'wide')"), "small.py:10: model() failed: TypeError"),
        (TASK.replace("batch[0]), batch[1])", "batch[0]), batch.labels)"), "small.py:27)"),
        (TASK.replace("nn.Linear(8, 16)", "nn.Linear(9, 16)"), "small.py:27)"),
    ],
)
def test_an_error_in_a_task_is_one_line_with_its_place(tmp_path, text, words):
    result = mfac("prune", write_task(tmp_path, text), *QUICK)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_the_error_whole(tmp_path):
    result = mfac("prune", write_task(tmp_path, TASK.replace("nn.Linear(8, 16)", "nn.Linear(9, 16)")), "--debug")
    assert isinstance(result.exception, RuntimeError)
    process = start("prune", "nowhere.py", "--debug", cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 1
    assert err.startswith("Traceback")
    assert out == ""


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path, monkeypatch):
    task = write_task(tmp_path)
    command = ["prune", task, "--sparsity", 0.5, "--sparsity", 0.8, *QUICK]
    with full_disk(monkeypatch, after=9):
        result = mfac(*command)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("mfac: ")]
    assert line.startswith("mfac: the disk is full (runs/small-prune/")
    assert "the same command goes on" in line
    assert mfac(*command).exit_code == 0
    mfac(*command, "--out", "whole")
    assert tensor_bytes(tmp_path / "runs" / "small-prune") == tensor_bytes(tmp_path / "whole")


SLOW = TASK.replace("return F.cross_entropy", "__import__('time').sleep(0.05); return F.cross_entropy")
LONG = ["--sparsity", "0.5", "--sparsity", "0.8", "--recomputations", "4", "--num-grads", "8"]


def test_interrupted_it_goes_on_to_the_same_bits_and_nobody_else_may_write_meanwhile(tmp_path):
    task = write_task(tmp_path, SLOW)
    process = start("prune", task, *LONG, cwd=tmp_path)
    folder = tmp_path / "runs" / "small-prune"
    deadline = time.monotonic() + 120
    while not (folder / "mfac-0.8" / "state.pt").exists():  # the first cell is complete, the second has a step
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    meanwhile = mfac("prune", task, *LONG)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == (
        "mfac: interrupted; what is done is kept in runs/small-prune (runs/small-prune/report.html); "
        "the same command goes on"
    )
    assert meanwhile.exit_code == 1
    assert "another process is writing to runs/small-prune" in meanwhile.stderr
    assert (folder / "report.html").exists()
    assert len(json.loads((folder / "run.json").read_text())["cells"]) == 1
    result = mfac("prune", task, *LONG)
    assert result.exit_code == 0
    assert "mfac-0.8: going on after" in result.stderr
    assert "mfac-0.5" not in result.stderr
    write_task(tmp_path, name="quick.py")
    mfac("prune", "quick.py", *LONG, "--out", "whole")
    assert tensor_bytes(folder) == tensor_bytes(tmp_path / "whole")

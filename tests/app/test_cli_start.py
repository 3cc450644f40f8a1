"""`mfac init` and `mfac plan`: what comes before a run."""

import json

import pytest
from cli_cases import mfac, write_task


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "data"))


def test_init_writes_a_task_that_can_be_planned_and_pruned(tmp_path):
    assert mfac("init").exit_code == 0
    plan = mfac("plan", "task.py", "--num-grads", 8, "--recomputations", 2)
    assert plan.exit_code == 0, plan.output
    assert plan.stdout.startswith("Pruning task: num_grads 8")
    assert plan.stdout.rstrip().endswith("It fits.")
    again = mfac("init")
    assert again.exit_code == 1
    assert again.stderr == "mfac: task.py is there already; choose another name, or overwrite it with --force\n"
    assert mfac("init", "--force").exit_code == 0
    assert "end in .py" in mfac("init", "task.txt").stderr


def test_plan_of_training_as_json(tmp_path):
    task = write_task(tmp_path)
    result = mfac("plan", task, "--train", "--num-grads", 16, "--window", "bfloat16", "--steps", 50, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["settings"] == {"num_grads": 16, "window": "torch.bfloat16", "momentum": False, "steps": 50}
    assert record["memory"]["window G"] == 16 * 212 * 2
    assert record["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "small.py", "--block-size", "big"], 2, "'big' is neither a number of weights nor none"),
        (["plan", "small.py", "--window", "int3"], 2, "'int3' is not one of float32"),
        (["plan", "small.py", "--sparsity", "1"], 1, "sparsity must be between 0 and 1"),
        (["plan", "small.py", "--device", "nowhere"], 1, "device 'nowhere' cannot be used here"),
        (["plan", "none.py"], 1, "there is no file none.py"),
        (["plan", "experiments.tasks.mnist"], 1, "`python -m experiments.datasets mnist` fetches it"),
    ],
)
def test_what_cannot_be_planned_is_told(tmp_path, arguments, code, message):
    write_task(tmp_path)
    result = mfac(*arguments)
    assert result.exit_code == code
    text = " ".join(result.stderr.replace("│", " ").split())
    assert message in text
    assert "Traceback" not in result.output

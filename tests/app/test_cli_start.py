"""`mfac data`, `mfac init` and `mfac plan`: what comes before a run."""

import hashlib
import json

import pytest
from cli_cases import mfac, write_task
from loopback import serve

from mfac.app.datasets import CATALOGUE, DataSet
from mfac.app.datasets.catalogue import Source

BODY = b"0123456789" * 500


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(monkeypatch):
    digest = hashlib.sha256(BODY).hexdigest()
    with serve({"toy.bin": BODY}) as running:
        source = Source("toy.bin", (f"{running.url}toy.bin",), f"sha256:{digest}", len(BODY))
        monkeypatch.setitem(CATALOGUE, "toy", DataSet("toy", "ten digits", (source,), {"toy/x": ("toy.bin", digest)}))
        yield running


def test_data_lists_what_there_is(server):
    result = mfac("data")
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "not here" in lines["mnist"]
    assert "70,000 handwritten digits" in lines["mnist"]
    assert mfac("data", "toy").exit_code == 0
    record = json.loads(mfac("data", "--json").stdout)
    states = {row["name"]: row["state"] for row in record["data"]}
    assert states["toy"] == "here"
    assert states["cifar10"] == "not here"


def test_data_says_what_differs_and_what_is_there_in_part(tmp_path):
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    (tmp_path / "data" / "mnist" / "train-labels-idx1-ubyte").write_bytes(b"mine")
    (tmp_path / "data" / "minilm-l3").mkdir()
    (tmp_path / "data" / "minilm-l3" / "config.json").write_text("{}")
    record = json.loads(mfac("data", "--json").stdout)
    states = {row["name"]: row["state"] for row in record["data"]}
    assert states["mnist"] == "differs from the published one"
    assert states["minilm-l3"] == "in part"


def test_data_is_fetched_once(server, tmp_path):
    first, second = mfac("data", "toy"), mfac("data", "toy")
    assert first.stdout == f"toy: fetched, under {tmp_path / 'data'}\n"
    assert second.stdout == f"toy: is there already, under {tmp_path / 'data'}\n"
    assert (tmp_path / "data" / "toy" / "x").read_bytes() == BODY
    assert len(server.requests) == 1


def test_data_as_json_and_in_another_folder(server, tmp_path):
    result = mfac("data", "toy", "--folder", tmp_path / "other", "--json")
    assert json.loads(result.stdout) == {
        "folder": str(tmp_path / "other"),
        "files": {"toy": [str(tmp_path / "other" / "toy" / "x")]},
    }


def test_data_that_cannot_be_had_is_one_line_and_an_exit_code(server):
    server.files.clear()
    result = mfac("data", "toy")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "the server answered 404" in result.stderr
    assert "By hand: save" in result.stderr


def test_an_unknown_name_fetches_nothing(server):
    result = mfac("data", "toy", "minst")
    assert result.exit_code == 1
    assert "did you mean mnist" in result.stderr
    assert server.requests == []


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
        (["plan", "mnist"], 1, "`mfac data mnist` fetches it"),
    ],
)
def test_what_cannot_be_planned_is_told(tmp_path, arguments, code, message):
    write_task(tmp_path)
    result = mfac(*arguments)
    assert result.exit_code == code
    text = " ".join(result.stderr.replace("│", " ").split())
    assert message in text
    assert "Traceback" not in result.output

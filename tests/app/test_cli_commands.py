"""The command line as a whole: help, versions, completion, reports, and a Hugging Face model all the way through."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_cases import QUICK, environment, mfac, write_task
from typer.testing import CliRunner

import mfac as library
from mfac.app.cli.app import app
from mfac.app.cli.progress_display import ProgressDisplay, RateColumn
from mfac.app.cli.tables import aligned, number, show

ROOT = Path(__file__).parents[2]
COMMANDS = ("prune", "train", "plan", "report", "init", "demo")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def test_help_names_every_command_and_its_first_steps():
    result = mfac("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in (*COMMANDS, "mfac prune digits --sparsity 0.9"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = mfac(command, "--help")
    assert result.exit_code == 0
    assert "--debug" in result.stdout
    assert f"Usage: mfac {command}" in result.stdout


def test_help_of_prune_groups_options_and_has_examples():
    text = mfac("prune", "--help").stdout
    for part in ("What is pruned", "How it is chosen", "Gradual pruning", "The run", "Examples:", "[default: (0.9)]"):
        assert part in text


def test_version_and_unknown_commands():
    assert mfac("--version").stdout == f"mfac {library.__version__}\n"
    assert mfac("purne").exit_code == 2
    assert mfac("prune").exit_code == 2


def test_completion_scripts_are_printed_and_complete_tasks():
    # Not by --show-completion, which guesses the shell from the parent processes, and under make there may be none.
    result = CliRunner().invoke(app, [], prog_name="mfac", env={"_MFAC_COMPLETE": "source_bash"})
    assert result.exit_code == 0
    assert "complete -o default -F _mfac_completion mfac" in result.stdout
    words = {"_MFAC_COMPLETE": "complete_bash", "COMP_WORDS": "mfac prune dig", "COMP_CWORD": "2"}
    assert CliRunner().invoke(app, [], prog_name="mfac", env=words).stdout.split() == ["digits"]
    words["COMP_WORDS"], words["COMP_CWORD"] = "mfac prune digits --method mag", "4"
    assert CliRunner().invoke(app, [], prog_name="mfac", env=words).stdout.split() == ["magnitude"]


def test_without_typer_one_line_says_what_to_install(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    result = subprocess.run(
        [sys.executable, "-m", "mfac", "demo"],
        env={**environment(), "PYTHONPATH": str(hidden)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == "mfac: the command line needs typer and rich: pip install 'torch-mfac[cli]'\n"


def test_a_report_of_several_runs(tmp_path):
    task = write_task(tmp_path)
    mfac("prune", task, *QUICK)
    mfac("train", task, "--steps", 4)
    result = mfac(
        "report", "runs/small-prune", "runs/small-train/run.json", "--out", "pages/both.html", "--title", "Two"
    )
    assert (result.exit_code, result.stdout) == (0, "The page: pages/both.html\n")
    page = (tmp_path / "pages" / "both.html").read_text()
    assert "Two" in page
    assert json.loads(mfac("report", "runs/small-prune", "--json").stdout) == {
        "report": "report.html", "runs": ["runs/small-prune"]
    }  # fmt: skip


def test_a_report_of_nothing_says_what_is_missing():
    result = mfac("report", "runs/absent")
    assert result.exit_code == 1
    assert result.stderr == (
        "mfac: runs/absent is no run folder: there is no run.json in it; `mfac prune` and `mfac train` make one\n"
    )


BERT = """
import torch
from transformers import BertConfig, BertForSequenceClassification

import mfac

loss = mfac.model_loss
measure = "accuracy"


def model():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=30, max_position_embeddings=12, num_labels=3, **shape)
    return BertForSequenceClassification(config)


def _batches(count):
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        ids = torch.randint(1, 30, (6, 10), generator=generator)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}


def train_batches():
    return list(_batches(10))


def eval_batches():
    return list(_batches(3))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@torch.no_grad()
def evaluate(model):
    hits = [(model(**batch).logits.argmax(1) == batch["labels"]).float().mean() for batch in _batches(3)]
    return float(sum(hits) / len(hits))
"""


def test_a_hugging_face_model_is_planned_trained_pruned_and_reported(tmp_path):
    task = write_task(tmp_path, BERT, "bert.py")
    assert "It fits." in mfac("plan", task, "--num-grads", 8).stdout
    trained = mfac(
        "train", task, "--optimizer", "mfac", "--optimizer", "task", "--epochs", 2, "--num-grads", 8, "--json"
    )
    assert trained.exit_code == 0, trained.output
    files = [cell["files"]["weights"] for cell in json.loads(trained.stdout)["cells"]]
    weights = tmp_path / "runs" / "bert-train" / files[1]
    pruned = mfac(
        "prune", task, "--checkpoint", weights, "--sparsity", 0.7, "--gradual", "--steps", 2, *QUICK, "--json"
    )
    assert pruned.exit_code == 0, pruned.output
    record = json.loads(pruned.stdout)
    assert record["dense"]["measure"] is not None
    assert abs(record["cells"][0]["sparsity"] - 0.7) < 1e-3
    assert not any("embeddings" in layer["name"] for layer in record["cells"][0]["layers"])
    assert mfac("report", "runs/bert-train", "runs/bert-prune").exit_code == 0
    assert "bert" in (tmp_path / "report.html").read_text()


def test_a_display_without_a_terminal_says_when_things_are_done(capsys):
    with ProgressDisplay() as display:
        display.begin("mfac-0.9", 4, "steps")
        display.at(2, "loss 0.1")
        display.end()
        display.say("a word")
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" in ")[0] for line in err.splitlines()] == ["mfac-0.9: done", "a word"]


def test_a_display_on_a_terminal_has_bars_with_rate_and_time_left():
    from rich.console import Console

    console = Console(force_terminal=True, width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with ProgressDisplay(console) as display:
        display.begin("mfac-0.9", 4, "steps")
        display.at(2.5, "loss 0.1")
        display.say("a word")
        display.end()
    text = console.export_text()
    console.file.close()
    assert "a word" in text
    assert "mfac-0.9" in text
    assert "4/4 steps" in text
    assert "loss 0.1" in text


@pytest.mark.parametrize(("speed", "words"), [(20.0, "20/s"), (0.25, "4 s each"), (None, "")])
def test_rates_are_told_in_the_unit_that_suits_them(speed, words):
    class Progressing:
        finished_speed = None

    Progressing.speed = speed
    assert RateColumn().render(Progressing()).plain == words


def test_tables_are_aligned_and_have_dashes_for_what_is_missing(capsys):
    assert number(None) == "-"
    assert number(0.123456) == "0.1235"
    assert aligned([("a", "long"), ("bbb", "1")]) == "a    long\nbbb     1"
    show("title", ("a", "b"), [("x", "1")])
    assert capsys.readouterr().out == "a  b\nx  1\n"


def commands_in(text):
    """The lines that are commands, in a document or in help, without what is said about them."""
    return [re.split(r"\s{3,}|  #", line)[0] for line in re.findall(r"^ {2,}(mfac [a-z].*)$", text, re.MULTILINE)]


def test_commands_in_the_guides_and_in_help_are_ones_that_exist():
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))] + [(ROOT / "README.md").read_text()]
    texts += [command.help or "" for command in typer.main.get_group(app).commands.values()]
    commands = [command for text in texts for command in commands_in(text)]
    assert len(commands) >= 10
    group = typer.main.get_group(app)
    for command in commands:
        _, name, *rest = shlex.split(command)
        assert name in group.commands, command
        group.commands[name].make_context(name, rest)  # raises for an unknown option or a value that does not fit

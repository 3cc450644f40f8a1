"""The command line as a whole: help, completion, displays and every command; other models all the way through."""

import io
import json
import re
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from cli_cases import QUICK, mfac, write_task
from rich.console import Console
from typer.testing import CliRunner

import mfac as library
from mfac.app import demo
from mfac.app.cli import main
from mfac.app.cli.commands import LIBRARY, app
from mfac.app.cli.display import ProgressDisplay, show_run
from mfac.app.runs.folder import read_run
from mfac.pruning.options import PruningOptions

ROOT = Path(__file__).parents[2]
COMMANDS = ("prune", "train", "plan", "report", "init", "demo")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def test_help_names_every_command_and_its_options():
    text = mfac("--help").stdout
    assert all(name in text for name in (*COMMANDS, "mfac prune digits --sparsity 0.9"))
    for command in COMMANDS:
        assert "--debug" in mfac(command, "--help").stdout
    text = mfac("prune", "--help").stdout
    for part in ("What is pruned", "How it is chosen", "Gradual pruning", "The run", "Examples:", "One gradient per"):
        assert part in text
    assert mfac("--version").stdout == f"mfac {library.__version__}\n"
    with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):  # as in a notebook
        main(["--version"])
    assert shown.getvalue() == f"mfac {library.__version__}\n"
    assert mfac("purne").exit_code == mfac("prune").exit_code == 2


def test_defaults_are_those_of_the_library():
    for item in LIBRARY:
        default = getattr(PruningOptions(), item.name)
        assert item.name == "recomputations" or str(item.default).lower() == str(default).lower()


def test_commands_in_the_guides_and_in_help_exist():
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))] + [(ROOT / "README.md").read_text()]
    group = typer.main.get_group(app)
    texts += [command.help or "" for command in group.commands.values()]
    lines = [line for text in texts for line in re.findall(r"^ {2,}(mfac [a-z].*)$", text, re.MULTILINE)]
    commands = [re.split(r"\s{3,}|  #", line)[0] for line in lines]
    assert len(commands) >= 10
    for command in commands:
        _, name, *rest = shlex.split(command)
        assert name in group.commands, command
        group.commands[name].make_context(name, rest)  # raises for an unknown option


def test_completion_knows_tasks_and_choices():
    # Not by --show-completion, which guesses the shell from the parent processes.
    result = CliRunner().invoke(app, [], prog_name="mfac", env={"_MFAC_COMPLETE": "source_bash"})
    assert "complete -o default -F _mfac_completion mfac" in result.stdout
    for line, place, expected in (("mfac prune dig", "2", "digits"), ("mfac prune x --method mag", "4", "magnitude")):
        words = {"_MFAC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": place}
        assert CliRunner().invoke(app, [], prog_name="mfac", env=words).stdout.split() == [expected]


def test_without_typer_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"mfac: the command line requires typer: pip install 'torch-mfac\[cli\]'"):
        main(["demo"])


def test_init_writes_a_task_that_can_be_planned(tmp_path):
    assert mfac("init").exit_code == 0
    plan = mfac("plan", "task.py", "--num-grads", 8, "--recomputations", 2)
    assert plan.stdout.startswith("Pruning task: num_grads 8")
    assert plan.stdout.rstrip().endswith("It fits.")
    assert mfac("init").exit_code == 1
    assert mfac("init", "--force").exit_code == 0


def test_plan_of_training_as_json(tmp_path):
    task = write_task(tmp_path)
    result = mfac("plan", task, "--train", "--num-grads", 16, "--window", "bfloat16", "--steps", 50, "--json")
    record = json.loads(result.stdout)
    assert (record["settings"]["optimizer"], record["settings"]["window"]) == ("full-matrix-adam", "torch.bfloat16")
    assert record["memory"]["window G"] == 16 * 212 * 2
    assert record["fits"] is True


def test_a_report_of_several_runs(tmp_path):
    task = write_task(tmp_path)
    mfac("prune", task, *QUICK, "--sparsity", 0, "--sparsity", 0.9)  # no step at all, and some
    mfac("train", task, "--steps", 4)
    assert mfac("report", "runs").stderr.endswith("did you mean runs/small-prune runs/small-train?\n")
    runs = ["runs/small-prune", "runs/small-train/run.json"]
    result = mfac("report", *runs, "--out", "pages/both.html", "--title", "Two")
    assert (result.exit_code, result.stdout) == (0, "Report: pages/both.html\n")
    page = (tmp_path / "pages" / "both.html").read_text()
    assert "Two" in page
    assert 'href="../runs/small-prune/mfac' in page
    assert 'href="../runs/small-train/' in page
    for _ in range(2):  # a report may be replaced
        found = json.loads(mfac("report", "runs/small-prune", "--json").stdout)
        assert found == {"report": "report.html", "runs": ["runs/small-prune"]}
    (tmp_path / "report.html").write_text("<html>mine</html>")
    refused = mfac("report", "runs/small-prune")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("mfac: report.html exists and is not a report of mfac; move it, choose another")
    assert (tmp_path / "report.html").read_text() == "<html>mine</html>"
    assert mfac("report", "runs/small-prune", "--force").exit_code == 0


def test_the_task_of_the_guide_with_a_hugging_face_model_is_trained_and_pruned(tmp_path):
    text = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "bring_your_own_model.md").read_text(), re.DOTALL)[1]
    task = write_task(tmp_path, text, "bert.py")
    optimizers = ["--optimizer", "mfac", "--optimizer", "adam"]
    trained = mfac("train", task, *optimizers, "--steps", 3, "--num-grads", 8, "--json")
    assert trained.exit_code == 0, trained.output
    files = [cell["files"]["weights"] for cell in json.loads(trained.stdout)["cells"]]
    options = ["--checkpoint", f"runs/bert-train/{files[1]}", "--sparsity", 0.7, "--gradual", "--steps", 2]
    pruned = mfac("prune", task, *options, *QUICK, "--json")
    assert pruned.exit_code == 0, pruned.output
    record = json.loads(pruned.stdout)
    assert abs(record["cells"][0]["sparsity"] - 0.7) < 1e-3
    assert not any("embeddings" in layer["name"] for layer in record["cells"][0]["layers"])


def test_displays_with_and_without_a_terminal(capsys):
    def show_work(display):
        with display:
            display.begin("mfac-0.9", 4)
            display.at(2.5, "loss 0.1")
            display.say("a word")
            display.end()

    show_work(ProgressDisplay())
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" in ")[0] for line in err.splitlines()] == ["a word", "mfac-0.9: done"]
    with open("/dev/null", "w") as nowhere:
        console = Console(force_terminal=True, width=120, record=True, file=nowhere)
        show_work(ProgressDisplay(console))
    text = console.export_text()
    assert all(part in text for part in ("a word", "mfac-0.9", "4/4", "loss 0.1"))


@pytest.mark.parametrize("columns", ["30", "200"])
def test_tables_keep_all_their_digits_in_any_width(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    last = {"loss": 0.12345, "measure": 0.98765}
    cell = {"label": "sgd", "seed": 0, "steps": 440, "losses": [0.5], "evaluations": [last], "seconds_total": 1.25}
    show_run({"kind": "train", "task": {"measure": "area under the curve"}, "cells": [cell]})
    heading, row = capsys.readouterr().out.splitlines()
    assert heading == "optimizer  seed  steps  training loss    loss  area under the curve  seconds"
    assert row.split() == ["sgd", "0", "440", "0.5", "0.1235", "0.9877", "1.2"]


def test_the_demo_ends_with_tables_a_picture_and_a_report(tmp_path, monkeypatch):
    options = replace(demo.PRUNING.options, recomputations=2)
    monkeypatch.setattr(demo, "PRUNING", replace(demo.PRUNING, sparsities=(0.9,), options=options))
    monkeypatch.setattr(demo, "TRAINING", replace(demo.TRAINING, seeds=(1,), epochs=1))
    folder = tmp_path / "demo"
    result = mfac("demo", "--out", folder)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith(("magnitude", "mfac", "full")) for line in lines) == 2 + 1
    assert lines[-1] == f"Report: {(folder / 'report.html').resolve()}"
    page = (folder / "report.html").read_text()
    assert all(name in page for name in ("Pruning of digits", "Training of digits", "magnitude", "adam"))
    for cell in (cell for kind in ("prune", "train") for cell in read_run(folder / kind)["cells"]):
        kind = "prune" if "method" in cell else "train"
        assert all(f'<a href="{kind}/{file}">{what}</a>' in page for what, file in cell["files"].items())
    assert (folder / "demo.png").stat().st_size > 10_000
    accuracy = {(cell["method"], cell["asked"]): cell["measure"] for cell in read_run(folder / "prune")["cells"]}
    (tmp_path / "demo.png").write_text("mine")
    refused = mfac("demo", "--out", tmp_path)
    assert (refused.exit_code, (tmp_path / "demo.png").read_text()) == (1, "mine")
    assert "is not empty and not the folder of a demo; choose another (--out)" in refused.stderr
    assert accuracy["mfac", 0.9] > accuracy["magnitude", 0.9] + 0.1

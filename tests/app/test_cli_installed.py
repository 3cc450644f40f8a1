"""A task in a package that was installed from a local folder: through every command, from somewhere else."""

import json
import os
import subprocess
import sys

import pytest
from cli_cases import QUICK, TASK, environment

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "weather-model"
version = "1.0"

[tool.setuptools]
packages = ["weather"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package in a folder of its own, as pip puts it there; what a user's environment has on its path."""
    source, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "weather").mkdir()
    (source / "weather" / "__init__.py").write_text("CLASSES = 4\n")
    task = TASK.replace("import torch\n", "import torch\n\nfrom weather import CLASSES\n", 1).replace(
        "16, 4)", "16, CLASSES)"
    )
    (source / "weather" / "task.py").write_text(task)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    found = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        pytest.skip(f"pip cannot install from a folder here: {found.stderr.strip().splitlines()[-1]}")
    return site


def test_it_goes_through_plan_prune_train_and_report(installed, tmp_path):
    def command(*words):
        done = subprocess.run(
            [sys.executable, "-m", "mfac", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**environment(), "PYTHONPATH": os.pathsep.join([str(installed)])},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "It fits." in command("plan", "weather.task")
    pruned = json.loads(command("prune", "weather.task", "--sparsity", "0.5", *QUICK, "--json"))
    trained = json.loads(command("train", "weather.task", "--epochs", "1", "--num-grads", "4", "--json"))
    assert [cell["sparsity"] for cell in pruned["cells"]] == [0.5]
    assert [cell["optimizer"] for cell in trained["cells"]] == ["mfac", "sgd"]
    command("report", pruned["folder"], trained["folder"], "--out", "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "Pruning of weather.task" in page
    assert "Training of weather.task" in page

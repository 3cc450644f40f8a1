"""Tasks by name, file and module: what works, and which errors there are."""

import re
import sys

import pytest
import torch

import mfac
from mfac.app.tasks import TaskError, load_task, write_template

GOOD = """
import torch
from torch import nn
import mfac

def model():
    return nn.Linear(3, 2)

def train_batches():
    return [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(3)]

loss = mfac.criterion_loss(nn.CrossEntropyLoss())
"""


@pytest.fixture(autouse=True)
def _paths(tmp_path, monkeypatch):
    """What loading adds to sys.path and sys.modules is removed afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("mfac_task_", "toy_package", "neighbour")):
            del sys.modules[name]


def write(folder, text, name="task.py"):
    (folder / name).write_text(text)
    return str(folder / name)


def trial(task):
    """One step of what every command does with a task."""
    model = task.model()
    G = mfac.collect_gradients(model, task.loss, task.train_batches(), 2, progress=False)
    assert G.shape[1] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert bool(G.isfinite().all())
    return model


def test_the_built_in_task():
    task = load_task("digits")
    assert (task.name, task.source, len(task.train_batches())) == ("digits", "", 44)
    assert sum(p.numel() for p in trial(task).parameters()) == 17_226
    assert [len(labels) for _, labels in task.eval_batches()] == [360]


EVERYTHING = """
measure, higher_is_better = 'error', False
def evaluate(model): return torch.tensor(0.25)
def eval_batches(): return train_batches()
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
def pretrain(model): model.weight.data.zero_()
"""


def test_files_with_the_required_functions_and_with_everything(tmp_path):
    task = load_task(write(tmp_path, GOOD))
    assert (task.name, task.source) == ("task", str(tmp_path / "task.py"))
    assert (task.evaluate, task.eval_batches, task.optimizer, task.pretrain) == (None,) * 4
    assert (task.measure, task.higher_is_better) == ("accuracy", True)
    # The loss is the user's own object: labels can be sampled for those of the library.
    G = mfac.collect_gradients(task.model(), task.loss, task.train_batches(), 8, per_sample=True, fisher="sampled")
    assert G.shape == (8, 8)
    task = load_task(write(tmp_path, GOOD + EVERYTHING))
    model = trial(task)
    assert (task.measure, task.higher_is_better, task.evaluate(model)) == ("error", False, 0.25)
    assert len(list(task.eval_batches())) == 3
    assert isinstance(task.optimizer(model.parameters()), torch.optim.SGD)
    task.pretrain(model)
    assert not model.weight.any()


def test_a_file_can_import_its_neighbours_and_two_of_one_name_are_two_tasks(tmp_path):
    text = GOOD.replace("    return nn.Linear(3, 2)", "    from neighbour_net import net\n    return net")
    write(tmp_path, "from torch import nn\nnet = nn.Linear(3, 2)\n", "neighbour_net.py")
    trial(load_task(write(tmp_path, text)))
    (tmp_path / "other").mkdir()
    other = load_task(write(tmp_path / "other", GOOD.replace("Linear(3, 2)", "Linear(5, 2)")))
    assert (load_task("task.py").model().in_features, other.model().in_features) == (3, 5)


def test_modules_on_the_path_and_in_the_current_folder(tmp_path, monkeypatch):
    package = tmp_path / "src" / "toy_package"
    package.mkdir(parents=True)
    write(package, "", "__init__.py")
    write(package, "from torch import nn\ndef net(): return nn.Linear(3, 2)\n", "networks.py")
    imported = GOOD.replace("import mfac", "import mfac\nfrom toy_package.networks import net as model", 1)
    write(package, imported.replace("def model", "def other"), "spam.py")
    monkeypatch.syspath_prepend(tmp_path / "src")
    task = load_task("toy_package.spam")
    assert (task.name, task.source) == ("toy_package.spam", "toy_package.spam")
    trial(task)
    write(tmp_path, GOOD, "toy_package_here.py")
    trial(load_task("toy_package_here"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def model():", "def model("), r"task.py:6: SyntaxError: "),
        (("import torch\n", "import torch\nimport no_such_thing\n"),
         r"task.py:3: importing it failed: ModuleNotFoundError: No module named 'no_such_thing'"),
        (("loss = ", "raise SystemExit(3)\nloss = "), r"task.py:12: importing it failed: SystemExit: 3"),
        (("def model", "loss = None\ndef net"), r"must define model\(\);"),
        ((GOOD, "x = 1\n"), r"must define model\(\), train_batches\(\) and loss\(model, batch\); `mfac init FILE`"),
        (("loss = mfac.criterion_loss(nn.CrossEntropyLoss())", "loss = nn.CrossEntropyLoss()"),
         r"loss must be a function loss\(model, batch\), not a CrossEntropyLoss; for batches \(inputs, targets\) write "
         r"loss = mfac.criterion_loss\(CrossEntropyLoss\(\)\)"),
        (("def model():\n    return ", "model = "), r"model must be a function model\(\), not a Linear"),
        (("def train_batches():", "def train_batches(size):"),
         r"task.py:9: train_batches must accept the call train_batches\(\): missing a required"),
        (("loss = ", "measure = 3\nloss = "), r"task.py: measure must be a str, not 3"),
    ],
    ids=lambda value: value[1][:20] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_errors_in_a_file_are_reported_on_loading(tmp_path, change, message):
    with pytest.raises(TaskError, match=message):
        load_task(write(tmp_path, GOOD.replace(*change, 1)))


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("model()", "return nn.Linear('a', 2)", r"task.py:15: model\(\) failed: TypeError: "),
        ("model()", "nn.Linear(3, 2)",
         r"task.py:14: model\(\) must return a torch.nn.Module, not None \(is a `return` missing\?\)"),
        ("model()", "raise MemoryError", "MemoryError: no message"),
        ("model()", "__import__('os').chdir('/tmp')", r"model\(\) changed the current folder; use Path\(__file__\)"),
        ("train_batches()", "return {'x': 1}",
         r"task.py:14: train_batches\(\) must return an iterable of batches, not a dict"),
        ("evaluate(model)", "return torch.ones(2)", r"evaluate\(model\) must return a number, not a Tensor"),
        ("optimizer(parameters)", "return list(parameters)", r"must return a torch.optim.Optimizer, not a list"),
        ("pretrain(model)", "raise RuntimeError('no\\nway')",
         r"task.py:15: pretrain\(\) failed: RuntimeError: no way"),
    ],
)  # fmt: skip
def test_errors_in_a_function_are_reported_with_their_line(tmp_path, monkeypatch, name, body, message):
    write(tmp_path, f"{GOOD}\ndef {name}:\n    {body}\n")
    task = load_task("task.py")
    monkeypatch.chdir("/")  # the file is found all the same
    function, _, argument = name[:-1].partition("(")
    model = torch.nn.Linear(3, 2)
    arguments = {"model": [model], "parameters": [model.parameters()]}.get(argument, [])
    with pytest.raises(TaskError, match=message) as caught:
        getattr(task, function)(*arguments)
    assert "\n" not in str(caught.value)


def test_what_is_no_task_at_all(tmp_path):
    write(tmp_path, "import torch\n1 / 0\n", "toy_package_bad.py")
    (tmp_path / "folder").mkdir()
    (tmp_path / "task.txt").touch()
    for spec, message in {
        "toy_package_bad": re.escape(f"{tmp_path}/toy_package_bad.py:2: importing it failed: ZeroDiv"),
        "digit": "no task 'digit'; did you mean digits",
        "no.such.module": r"no task 'no.such.module'; a task is digits, a file \(task.py\) or a module",
        "./folder": "folder is a folder or",
        "two words.py": "`mfac init 'two words.py'` writes",
        "./task.txt": r"does not end in .py; a task is",
    }.items():
        with pytest.raises(TaskError, match=message):
            load_task(spec)


def test_the_template_works_as_it_is_and_overwrites_nothing(tmp_path):
    path = tmp_path / "mine.py"
    write_template(path)
    assert f"mfac plan {path}" in path.read_text()
    trial(load_task(str(path)))
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="exists already; choose another name, or overwrite it with --force"):
        write_template(path)
    write_template(path, force=True)
    assert path.read_text().startswith('"""A task for mfac')
    with pytest.raises(ValueError, match=r"should end in .py"):
        write_template(tmp_path / "mine.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_template(tmp_path / "no" / "mine.py")


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.delitem(sys.modules, "mfac.app.tasks.digits", raising=False)
    with pytest.raises(TaskError, match=r"digits requires scikit-learn: pip install 'torch-mfac\[demo\]'"):
        load_task("digits")

"""Tasks by file and by module: what works, and what is told where it does not."""

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
def _paths(monkeypatch):
    """What loading adds to sys.path and sys.modules is gone afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
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


def test_a_file_with_the_least_that_is_needed(tmp_path):
    task = load_task(write(tmp_path, GOOD))
    assert (task.name, task.source) == ("task", str(tmp_path / "task.py"))
    assert (task.evaluate, task.eval_batches, task.optimizer, task.pretrain) == (None,) * 4
    assert (task.measure, task.higher_is_better) == ("accuracy", True)
    trial(task)


def test_a_file_with_all_there_can_be(tmp_path):
    text = GOOD + (
        "measure, higher_is_better = 'error', False\n"
        "def evaluate(model): return torch.tensor(0.25)\n"
        "def eval_batches(): return train_batches()\n"
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)\n"
        "def pretrain(model): model.weight.data.zero_()\n"
    )
    task = load_task(write(tmp_path, text))
    model = trial(task)
    assert (task.measure, task.higher_is_better) == ("error", False)
    assert task.evaluate(model) == 0.25
    assert isinstance(task.evaluate(model), float)
    assert len(list(task.eval_batches())) == 3
    assert isinstance(task.optimizer(model.parameters()), torch.optim.SGD)
    task.pretrain(model)
    assert not model.weight.any()


def test_a_loss_stays_what_it_is(tmp_path):
    """The library knows its own losses by their class: labels can be drawn for them."""
    task = load_task(write(tmp_path, GOOD))
    G = mfac.collect_gradients(task.model(), task.loss, task.train_batches(), 8, per_sample=True, fisher="sampled")
    assert G.shape == (8, 8)


def test_a_file_can_import_its_neighbours_later_too(tmp_path):
    write(tmp_path, "from torch import nn\nnet = nn.Linear(3, 2)\n", "neighbour_net.py")
    text = GOOD.replace("    return nn.Linear(3, 2)", "    from neighbour_net import net\n    return net")
    trial(load_task(write(tmp_path, text)))


def test_two_files_of_one_name_are_two_tasks(tmp_path):
    for name, width in (("one", 3), ("two", 5)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, GOOD.replace("Linear(3, 2)", f"Linear({width}, 2)"))
    first, second = (load_task(str(tmp_path / name / "task.py")) for name in ("one", "two"))
    assert (first.model().in_features, second.model().in_features) == (3, 5)


def test_a_module_of_a_package_on_the_path(tmp_path, monkeypatch):
    package = tmp_path / "src" / "toy_package"
    package.mkdir(parents=True)
    write(package, "", "__init__.py")
    write(package, "from torch import nn\ndef net(): return nn.Linear(3, 2)\n", "networks.py")
    write(package, GOOD.replace("import mfac", "import mfac\nfrom toy_package.networks import net as model", 1)
          .replace("def model", "def other"), "spam.py")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path / "src")
    task = load_task("toy_package.spam")
    assert (task.name, task.source) == ("toy_package.spam", "toy_package.spam")
    trial(task)


def test_a_module_in_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path, GOOD, "toy_package_here.py")
    monkeypatch.chdir(tmp_path)
    trial(load_task("toy_package_here"))


def test_a_hugging_face_model_from_a_config(tmp_path):
    text = """
import torch
from transformers import BertConfig, BertForSequenceClassification
import mfac

CONFIG = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                    max_position_embeddings=16, num_labels=3)

def model():
    return BertForSequenceClassification(CONFIG)

def train_batches():
    ids = torch.randint(5, 50, (8, 4, 12))
    return [{"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part[:, 0] % 3} for part in ids]

loss = mfac.model_loss

@torch.no_grad()
def evaluate(model):
    return sum(float(model(**batch).loss) for batch in train_batches()) / 8

measure, higher_is_better = "loss", False
"""
    task = load_task(write(tmp_path, text))
    model = trial(task)
    result = mfac.prune(
        model, task.loss, task.train_batches(), 0.5, num_grads=4, recomputations=2, block_size=16, progress=False
    )
    assert abs(result.sparsity - 0.5) < 1e-3
    assert 0.5 < task.evaluate(model) < 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def model():", "def model("), r"task.py:6: SyntaxError: "),
        (("import torch\n", "import torch\nimport no_such_thing\n"),
         r"task.py:3: importing it failed: ModuleNotFoundError: No module named 'no_such_thing'"),
        (("loss = ", "raise SystemExit(3)\nloss = "), r"task.py:12: importing it failed: SystemExit: 3"),
        (("def model", "def net"), r"must define model\(\); `mfac init FILE`"),
        (("def model", "loss = None\ndef net"), r"must define model\(\);"),
        (("loss = ", "criterion = "), r"must define loss\(model, batch\)"),
        (("loss = mfac.criterion_loss(nn.CrossEntropyLoss())", "loss = nn.CrossEntropyLoss()"),
         r"loss must be a function loss\(model, batch\), not a CrossEntropyLoss; for batches \(inputs, targets\) write "
         r"loss = mfac.criterion_loss\(CrossEntropyLoss\(\)\)"),
        (("def model():\n    return ", "model = "), r"model must be a function model\(\), not a Linear"),
        (("def train_batches():", "def train_batches(size):"),
         r"task.py:9: train_batches must accept the call train_batches\(\): missing a required"),
        (("loss = ", "measure = 3\nloss = "), r"task.py: measure must be a str, not 3"),
        (("loss = ", "higher_is_better = 'yes'\nloss = "), r"higher_is_better must be a bool, not 'yes'"),
        (("loss = ", "evaluate = 0.5\nloss = "), r"evaluate must be a function evaluate\(model\), not a float"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_on_loading(tmp_path, change, message):
    with pytest.raises(TaskError, match=message):
        load_task(write(tmp_path, GOOD.replace(*change, 1)))


def test_all_that_is_missing_is_told_at_once(tmp_path):
    with pytest.raises(TaskError, match=r"must define model\(\), train_batches\(\) and loss\(model, batch\);"):
        load_task(write(tmp_path, "x = 1\n"))


@pytest.mark.parametrize(
    ("text", "call", "message"),
    [
        ("def model():\n    return nn.Linear('a', 2)\n", lambda task: task.model(),
         r"task.py:15: model\(\) failed: TypeError: "),
        ("def model():\n    nn.Linear(3, 2)\n", lambda task: task.model(),
         r"task.py:14: model\(\) must return a torch.nn.Module, not None \(is a `return` missing\?\)"),
        ("def model():\n    return nn.Linear\n", lambda task: task.model(), r"Module, not a type"),
        ("def train_batches():\n    return {'x': 1}\n", lambda task: task.train_batches(),
         r"task.py:14: train_batches\(\) must return an iterable of batches, not a dict"),
        ("def train_batches():\n    return 1 / 0\n", lambda task: task.train_batches(),
         r"task.py:15: train_batches\(\) failed: ZeroDivisionError: division by zero"),
        ("def evaluate(model):\n    return 'good'\n", lambda task: task.evaluate(task.model()),
         r"evaluate\(model\) must return a number, not a str"),
        ("def optimizer(parameters):\n    return list(parameters)\n",
         lambda task: task.optimizer(task.model().parameters()), r"must return a torch.optim.Optimizer, not a list"),
        ("def pretrain(model):\n    raise RuntimeError('no\\nway')\n", lambda task: task.pretrain(task.model()),
         r"task.py:15: pretrain\(\) failed: RuntimeError: no way"),
        ("def model():\n    raise MemoryError\n", lambda task: task.model(), "MemoryError: no message"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_goes_wrong_in_a_function_is_told_with_its_line(tmp_path, text, call, message):
    task = load_task(write(tmp_path, f"{GOOD}\n{text}"))
    with pytest.raises(TaskError, match=message) as caught:
        call(task)
    assert "\n" not in str(caught.value)


def test_a_line_is_named_from_another_folder_too(tmp_path, monkeypatch):
    write(tmp_path, GOOD.replace("nn.Linear(3, 2)", "1 / 0"))
    monkeypatch.chdir(tmp_path)
    task = load_task("task.py")
    monkeypatch.chdir("/")
    with pytest.raises(TaskError, match=r"^task.py:7: model\(\) failed: ZeroDivisionError"):
        task.model()


def test_an_error_in_a_module_names_its_file(tmp_path, monkeypatch):
    write(tmp_path, "import torch\n1 / 0\n", "toy_package_bad.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TaskError, match=re.escape(f"{tmp_path}/toy_package_bad.py:2: importing it failed: ZeroDiv")):
        load_task("toy_package_bad")


def test_what_is_no_task_at_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match="no task 'digit'; did you mean digits"):
        load_task("digit")
    with pytest.raises(TaskError, match=r"no task 'no.such.module'; a task is digits, a file"):
        load_task("no.such.module")
    with pytest.raises(TaskError, match="no task 'what is this'"):
        load_task("what is this")
    with pytest.raises(TaskError, match=r"there is no file missing.py; `mfac init missing.py` writes a task file"):
        load_task("missing.py")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TaskError, match="folder is a folder"):
        load_task("./folder")
    (tmp_path / "task.txt").touch()
    with pytest.raises(TaskError, match=r"does not end in .py"):
        load_task("./task.txt")


def test_the_template_works_as_it_stands(tmp_path):
    path = tmp_path / "mine.py"
    write_template(path)
    task = load_task(str(path))
    assert f"mfac plan {path}" in path.read_text()
    model = trial(task)
    task.pretrain(model)
    assert task.evaluate(model) > 0.95
    assert isinstance(task.optimizer(model.parameters()), torch.optim.Adam)


def test_the_template_overwrites_nothing(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="exists already; choose another name, or overwrite it with --force"):
        write_template(path)
    assert path.read_text() == "mine"
    write_template(path, force=True)
    assert path.read_text().startswith('"""A task for mfac')
    with pytest.raises(ValueError, match=r"should end in .py"):
        write_template(tmp_path / "mine.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_template(tmp_path / "no" / "mine.py")

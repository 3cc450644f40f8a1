"""Every recipe runs end to end at a tiny size, and goes on where it was stopped; the loops behind them."""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from models import failing_loss
from public_data import needs_data
from torch import nn

import mfac
from experiments import __main__ as command
from experiments.ledger import Ledger
from experiments.recipe import Recipe, Request
from experiments.recipes import RECIPES, table1, table2, table4_right
from experiments.step_times import overheads
from experiments.training import Training, cosine, cross_entropy, drops, last_loss


class Batches:
    """Two batches a pass, drawn by a generator."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        for _ in range(2):
            x = torch.randn(8, 5, generator=self.generator)
            yield x, (x[:, 0] > 0).long()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


@needs_data
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_runs_draws_and_is_not_run_twice(name, tmp_path, capsys):
    request = Request("smoke", tmp_path)
    command.run_one(name, request)
    files = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert files
    assert all(json.loads(text)["cells"] for text in files.values())
    assert RECIPES[name].plot(request).stat().st_size > 5000
    capsys.readouterr()
    RECIPES[name].run(request)  # every cell is there: nothing is computed again
    assert " ..." not in capsys.readouterr().out
    assert {path.name: path.read_text() for path in tmp_path.glob("*.json")} == files


def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path):
    def training(keep=None, stop=None):
        model = network()
        optimizer = mfac.MFAC(model.parameters(), 0.1, 3, 0.1, normalize="sum")
        run = Training(model, optimizer, Batches(), 6, drops(0.5), keep=keep, test=lambda m: {}, test_every=2)
        run.loss_fn = failing_loss(stop, KeyboardInterrupt(), cross_entropy)
        return run

    path = tmp_path / "run.pt"
    whole, resumed = training(), training(path)
    with pytest.raises(KeyboardInterrupt):
        training(path, stop=6).run()
    assert whole.run()["losses"] == resumed.run()["losses"]
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    assert not path.exists()


def test_a_training_that_diverges_stops_and_says_so():
    model = network()
    record = Training(model, torch.optim.SGD(model.parameters(), float("inf")), Batches(), 20, cosine).run()
    assert not record["finished"]
    assert last_loss(record) == float("inf")


def test_learning_rates_memory_and_overheads_are_those_of_the_formulas():
    assert [table1.learning_rate(e) for e in (0, 29, 30)] == pytest.approx([0.005, 0.005, 0.005 * 0.92])
    lengths = table2.block_lengths(25, 10, None)
    assert lengths == {10: 2, 5: 1}
    assert table2.woodfisher_bytes(lengths) == 4 * (2 * 100 + 25)
    assert table2.mfac_bytes(lengths, 7) == 4 * 7 * 25 + 8 * (2 * 49 + 25)
    whole = table2.block_lengths(table2.WEIGHTS["ResNet50"], None, None)
    assert table2.woodfisher_bytes(whole) > table2.PAPER_MEMORY > table2.mfac_bytes(whole, 512)
    found = overheads({"SGD": [2.0, 1.0, 4.0], "M-FAC": [3.0, 1.5, 3.0]}, "SGD")
    assert found["M-FAC"]["over_sgd"] == 1.5
    assert found["M-FAC"]["over_sgd_by_medians"] == 1.5
    assert table4_right.continue_line({64: 1.05, 128: 1.10}, 1024) == pytest.approx(1.8)
    assert table4_right.continue_line({1024: 1.3}, 1024) == 1.3


def test_all_recipes_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    recipes, settings = Mock(), table1.Settings()
    recipes.bad.side_effect = RuntimeError("no data")
    made = [
        Recipe("bad", "first", recipes.bad, lambda results, settings: tmp_path / "a.png", settings, settings, 1),
        Recipe("good", "second", recipes.good, lambda results, settings: tmp_path / "b.png", settings, settings, 1),
    ]
    monkeypatch.setattr(command, "RECIPES", {recipe.name: recipe for recipe in made})
    with pytest.raises(SystemExit, match="failed: bad"):
        command.run_all(Request("small", tmp_path))
    assert [name for name, *_ in recipes.mock_calls] == ["bad", "good"]
    out = capsys.readouterr().out
    assert "1 of 2: bad failed: RuntimeError: no data" in out
    assert "2 of 2: good, second" in out


def test_rows_are_done_by_one_process_each(tmp_path):
    one, other = (Request("smoke", tmp_path, only="row", shared=tmp_path) for _ in range(2))
    assert one.wants("row 1")
    assert not other.wants("row 1")
    assert one.wants("row 1")  # it asks again, and still has it
    assert other.wants("row 2")
    assert not other.wants("something else")
    assert Request("smoke", tmp_path).wants("row 1")


def test_nothing_is_lost_between_runs_that_share_a_file(tmp_path):
    def add(name):
        ledger = Ledger("runs", "a command", tmp_path)
        for i in range(30):
            ledger.cell(f"{name}, {i}", lambda: "x" * 1000)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, "abcd"))
    record = json.loads((tmp_path / "runs.json").read_text())
    assert record["command"] == "a command"
    cells = record["cells"]
    assert Ledger("runs", "a command", tmp_path).cell("a, 0", lambda: pytest.fail("it was there")) == "x" * 1000
    assert set(cells) == {f"{name}, {i}" for name in "abcd" for i in range(30)}
    assert [path.name for path in tmp_path.iterdir()] == ["runs.json"]


RESULTS = Path(command.__file__).parent / "results"
COMMITTED = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}


@needs_data
@pytest.mark.parametrize("name", COMMITTED)
def test_the_command_of_committed_results_runs_and_measures_nothing(name, monkeypatch, capsys):
    def saved(ledger, key, _):
        return ledger.cells[key] if key in ledger.cells else pytest.skip(f"{key} has not been measured yet")

    monkeypatch.setattr(Ledger, "cell", saved)
    monkeypatch.setattr("subprocess.run", lambda *command, **options: None)  # of a row in a process of its own
    module, *arguments = json.loads(COMMITTED[name].read_text())["command"].split(" -m ")[1].split()
    if module == "experiments":
        RECIPES[arguments[1]].run(Request("small"))
    else:
        monkeypatch.setattr("sys.argv", [module, *arguments])
        importlib.import_module(module).main()

"""The benchmark of peers: its truth is true, its contenders answer the same question, its cells have limits."""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import oracle
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import bench_peers
from peers import inverses, matrices, page, steps, tables
from peers.cells import Journal, Limits, run_cell

M, D = 6, 40
SMALL = {"task": "inverse", "method": "mfac", "d": D, "m": M}
PLENTY = Limits(bytes=10**12, seconds=20.0)


def needs_nothing(cell):
    return 0


def test_the_truth_is_that_of_the_dense_matrix():
    G, x, true = matrices.rows(M, D), matrices.vector(D), matrices.truth(M, D)
    inverse, _ = oracle.inverse(oracle.fisher(G, matrices.DAMPING))
    assert oracle.error(true["product"], inverse @ oracle.wide(x)) < 1e-8
    assert oracle.error(true["step"], inverse @ oracle.wide(G[0])) < 1e-8
    assert oracle.error(true["diagonal"], inverse.diagonal()[matrices.sampled_columns(D)]) < 1e-8


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(bench_peers.__file__).parent.glob("bench_*.py")))
def test_every_benchmark_can_be_imported(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", inverses.CONTENDERS)
def test_contenders_answer_the_same_question(name):
    G, x, true = matrices.rows(M, D), matrices.vector(D), matrices.truth(M, D)
    contender = inverses.CONTENDERS[name][0](G)
    assert matrices.error(contender.product(x), true["product"]) < 2e-3
    if name != "conjugate gradients":
        assert matrices.worst(contender.diagonal()[matrices.sampled_columns(D)], true["diagonal"]) < 2e-3


@pytest.mark.parametrize("name", ["mfac", "Algorithms 1 and 2", "GGT", "conjugate gradients"])
def test_steps_answer_the_same_question(name, tmp_path):
    matrices.save_truth(tmp_path, M, D)
    row = steps.measure(SMALL | {"method": name}, Mock(), tmp_path)
    assert row["step_error"] < 5e-3
    assert row["step_s"] > 0


def test_what_does_not_fit_is_not_begun_and_what_is_too_slow_is_stopped_and_larger_ones_are_not_begun():
    cell = {"task": "inverse", "method": "dense inverse", "d": 10**5, "m": 16}
    result = run_cell(cell, None, bench_peers.needs, Limits(10**10, 1.0), [])
    assert (result["outcome"], result["why"]) == ("does not fit", "does not fit: 120 GB")

    def endless(cell, report):
        report.ready()
        time.sleep(60)

    result = run_cell(SMALL, endless, needs_nothing, Limits(1, 0.2), [])
    assert (result["outcome"], result["why"]) == ("too slow", "too slow: stopped after 0.2 s")
    larger = run_cell(SMALL | {"d": 10 * D}, None, needs_nothing, PLENTY, [(SMALL, result)])
    assert larger["why"] == "too slow already at d = 40, m = 6"


def test_a_cell_that_fails_says_why():
    def broken(cell, report):
        raise ValueError("no such thing")

    def killed(cell, report):
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_cell(SMALL, broken, needs_nothing, PLENTY, [])["why"] == "ValueError: no such thing"
    assert "its process ended with -9" in run_cell(SMALL, killed, needs_nothing, PLENTY, [])["why"]


def test_a_journal_goes_on_and_one_of_another_machine_does_not(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, {"machine": 1}).add(SMALL, {"outcome": "measured"})
    with open(path, "a") as file:
        file.write('{"cell": {"task": "torn')
    assert list(Journal(path, {"machine": 1}).results.values()) == [{"outcome": "measured"}]
    assert Journal(path, {"machine": 2}).results == {}


def test_a_small_run_from_the_first_cell_to_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_peers, "WORK", tmp_path)
    monkeypatch.setattr(bench_peers.training, "CONTENDERS", {"SGD": bench_peers.training.CONTENDERS["SGD"]})
    monkeypatch.setattr(bench_peers.machine, "PASS", (16, 10_000))
    monkeypatch.setattr(bench_peers.machine, "PRODUCT", (64, 64))
    bench_peers.main(["--smoke", "--gigabytes", "4"])
    record = json.loads((tmp_path / "peers_smoke.json").read_text())
    outcomes = {(row["task"], row["method"]): row["outcome"] for row in record["rows"]}
    assert set(outcomes.values()) == {"measured"}, outcomes
    assert len(outcomes) == 2 + len(inverses.CONTENDERS) + len(steps.NEEDS) + 1
    assert "[1 of " in capsys.readouterr().out
    text = page.section(record, tmp_path / "images")
    for picture in ("step", "product", "diagonal", "error", "memory", "training"):
        assert f"images/peers_{picture}.png" in text
        assert (tmp_path / "images" / f"peers_{picture}.png").stat().st_size > 10_000
    assert all(row["peak_bytes"] > 0 for row in tables.chosen(record["rows"], "step"))

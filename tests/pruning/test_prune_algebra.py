"""Removal against dense float64 solves: scores, updates, predicted increases, groups, the greedy order."""

import itertools

import pytest
import torch
from cases import write
from pruning_cases import DAMPING, SIZES, blocks_of, dense_joint, dense_scores, dense_update, literal_greedy, quadratic

import mfac
from mfac import pages, primal
from mfac.pruning.curvature import FisherCurvature, greedy_costs

CPU = torch.device("cpu")


def built(kind, rows, block_size, tmp_path=None, monkeypatch=None):
    """The same matrix from rows, from slices of rows, from sums, and from disk."""
    if kind == "sums":
        sums = mfac.FisherBlocks(rows.shape[1], block_size, SIZES)
        sums.add(rows)
        return FisherCurvature.of_rows(sums, DAMPING, block_size, SIZES, CPU)
    if kind == "sliced":
        monkeypatch.setattr(pages, "WIDE_PIECE", 5 * len(rows))
        monkeypatch.setattr(pages, "BLOCK_PIECE", 5 * len(rows))
    if kind == "disk":
        rows = write(rows, tmp_path / "rows")
    return FisherCurvature.of_rows(rows, DAMPING, block_size, SIZES, CPU)


CASES = [
    *itertools.product(["rows"], [4, 24], [None, 7]),
    *[("rows", 4, 1), ("sliced", 4, None), ("sliced", 24, 7), ("disk", 24, None), ("disk", 4, 7), ("sums", 24, 7)],
]


@pytest.mark.parametrize(("kind", "m", "block_size"), CASES)
@pytest.mark.parametrize("update", ["joint", "obs", "none"])
def test_every_update_is_the_dense_one(kind, m, block_size, update, tmp_path, monkeypatch):
    problem = quadratic(m, block_size)
    removed = torch.rand(32, generator=torch.Generator().manual_seed(3)) < 0.4
    curvature = built(kind, problem.rows, block_size, tmp_path, monkeypatch)
    delta, cost = curvature.remove(problem.theta, removed, update)
    truth = dense_update(problem.F, problem.theta, removed, update)
    tight = {"rtol": 1e-4, "atol": 1e-4} if kind == "sums" and update == "obs" else {"rtol": 1e-9, "atol": 1e-9}
    assert torch.allclose(delta, truth, **tight)
    assert torch.equal(delta[removed], -problem.theta[removed])
    assert cost == pytest.approx(0.5 * float(truth @ problem.F @ truth), rel=max(1e-9, tight["rtol"]))
    assert torch.allclose(curvature.scores(problem.theta), dense_scores(problem.F, problem.theta), rtol=1e-5)


@pytest.mark.parametrize("block_size", [None, 7, 32])
@pytest.mark.parametrize(("kind", "m"), [("rows", 4), ("rows", 24), ("sliced", 24)])
def test_groups_cost_what_the_dense_system_says(kind, m, block_size, monkeypatch):
    problem = quadratic(m, block_size)
    ids = torch.randint(6, (32,), generator=torch.Generator().manual_seed(5))
    costs = built(kind, problem.rows, block_size, monkeypatch=monkeypatch).group_costs(problem.theta, ids, 7)
    truth = [dense_joint(problem.F, problem.theta, ids == group)[1] for group in range(6)]
    assert costs[:6].tolist() == pytest.approx(truth, rel=1e-8)
    assert costs[6] == 0


def test_the_greedy_order_is_remove_one_update_remove_the_next():
    problem = quadratic(8, 10)
    (start, stop), *_ = blocks_of(10)
    F, theta = problem.F[start:stop, start:stop], problem.theta[start:stop]
    order = literal_greedy(F, theta, range(10), 10)
    costs = greedy_costs(torch.linalg.inv(F)[None], theta[None], torch.inf)[0]
    assert costs.argsort(stable=True).tolist() == [weight for weight, _ in order]
    highest = torch.tensor([cost for _, cost in order]).cummax(0).values
    assert costs.sort().values.tolist() == pytest.approx(highest.tolist(), rel=1e-5)
    # The steps of the greedy order add up to the joint removal of what went.
    first = torch.zeros(10, dtype=torch.bool)
    first[[weight for weight, _ in order[:4]]] = True
    assert sum(cost for _, cost in order[:4]) == pytest.approx(dense_joint(F, theta, first)[1])


@pytest.mark.parametrize("kind", ["rows", "sums"])
def test_blocks_that_stop_early_do_not_change_the_greedy_choice(kind, monkeypatch):
    monkeypatch.setattr(pages, "BLOCK_PIECE", 1)
    monkeypatch.setattr(primal, "BLOCK_PIECE", 1)
    problem = quadratic(8, 5)
    curvature = built(kind, problem.rows, 5)
    whole, limited = curvature.greedy_scores(problem.theta, 32), curvature.greedy_scores(problem.theta, 6)
    assert torch.isfinite(whole).all()
    assert torch.isinf(limited).any()
    assert set(whole.topk(6, largest=False).indices.tolist()) == set(limited.topk(6, largest=False).indices.tolist())

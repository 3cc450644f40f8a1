"""N:M, rows, channels and the greedy order: every group checked, every choice against the dense costs."""

import pytest
import torch
from models import mlp
from pruning_cases import dense_joint, literal_greedy, quadratic, quick, solve, zeros
from torch import nn


def wide_mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8))
    return mlp()._replace(model=model, batch=[(torch.randn(6, 16), torch.randint(8, (6,))) for _ in range(4)])


def convolutions():
    torch.manual_seed(0)
    first, second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=2)
    model = nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(32, 4))
    return mlp()._replace(model=model, batch=[(torch.randn(6, 4, 4, 4), torch.randint(4, (6,))) for _ in range(4)])


def pruned(case, sparsity=None, **options):
    return quick(case, sparsity, case.batch, **({"num_grads": 6, "block_size": 32, "recomputations": 2} | options))


def group_counts(tensor, size):
    return tensor.movedim(1, -1).unflatten(-1, (-1, size)).count_nonzero(-1)


@pytest.mark.parametrize("method", ["mfac", "magnitude", "diagonal"])
@pytest.mark.parametrize(("make", "pattern", "kept", "size"), [(wide_mlp, "3:4", 3, 4), (convolutions, "1:2", 1, 2)])
def test_every_group_of_every_tensor_has_n_of_m(make, method, pattern, kept, size):
    case = make()
    result = pruned(case, pattern=pattern, method=method)
    for name in result.targets:
        weight = dict(case.model.named_parameters())[name]
        assert (group_counts(weight, size) == kept).all()
        assert torch.equal(weight != 0, result.masks[name])
    assert result.sparsity == 1 - kept / size
    assert len(result.history) == 2


def test_groups_that_masks_made_sparser_stay_so():
    case = wide_mlp()
    mask = torch.ones(12, 16, dtype=torch.bool)
    mask[0, :3] = False
    mask[1, 4] = False
    result = pruned(case, pattern="2:4", masks={"0.weight": mask})
    counts = group_counts(case.model[0].weight, 4)
    assert counts[0, 0] == 1
    assert (counts.flatten()[1:] == 2).all()
    assert not (result.masks["0.weight"] & ~mask).any()


@pytest.mark.parametrize("blocks", ["full", "of 12", "of 5, across groups", "of 3, summed"])
def test_groups_lose_what_surgery_inside_them_would_take(blocks):
    block_size = None if "full" in blocks else int(blocks[3:5].strip(","))
    problem = quadratic(8, block_size)
    with torch.no_grad():  # weights of one size, so that the order is decided by the curvature
        problem.theta.copy_(1 + 0.1 * problem.theta)
        problem.model.first.copy_(problem.theta[:12].view(3, 4))
        problem.model.second.copy_(problem.theta[12:].view(4, 5))
    result = solve(problem, None, block_size, pattern="2:4", targets="first")
    F = problem.F[:12, :12]
    gone = torch.zeros(12, dtype=torch.bool)
    for first in (0, 4, 8):  # surgery inside each group alone
        gone[[i for i, _ in literal_greedy(F, problem.theta[:12], range(first, first + 4), 2)]] = True
    assert torch.equal(~result.masks["first"].flatten(), gone)
    assert result.predicted_increase == pytest.approx(dense_joint(F, problem.theta[:12], gone)[1], rel=1e-8)


@pytest.mark.parametrize("pattern", ["row", "channel"])
@pytest.mark.parametrize(("method", "block_size"), [("mfac", None), ("mfac", 16), ("magnitude", 16)])
def test_slices_go_whole_and_none_is_the_last(pattern, method, block_size):
    case = wide_mlp()
    result = pruned(case, 0.4, pattern=pattern, method=method, block_size=block_size)
    along = 1 if pattern == "row" else 0
    for mask in result.masks.values():
        whole = mask.float().mean(along)
        assert set(whole.unique().tolist()) <= {0.0, 1.0}
        assert whole.any()
    assert 0.3 < result.sparsity <= 0.4
    assert result.num_removed == zeros(case.model)


@pytest.mark.parametrize("block_size", [None, 6])
def test_the_row_that_goes_is_the_cheapest_a_weight_by_the_dense_system(block_size):
    problem = quadratic(8, block_size)
    result = solve(problem, 5 / 32, block_size, pattern="row")
    rows = [(i * 4, i * 4 + 4) for i in range(3)] + [(12 + i * 5, 17 + i * 5) for i in range(4)]
    costs = {}
    for start, stop in rows:
        removed = torch.zeros(32, dtype=torch.bool)
        removed[start:stop] = True
        costs[start, stop] = dense_joint(problem.F, problem.theta, removed)[1] / (stop - start)
    start, stop = min(costs, key=costs.get)
    gone = ~torch.cat([mask.flatten() for mask in result.masks.values()])
    assert gone.nonzero()[:, 0].tolist() == list(range(start, stop))
    assert result.true_increase == pytest.approx(result.predicted_increase, rel=1e-8)
    assert result.predicted_increase == pytest.approx(costs[start, stop] * (stop - start), rel=1e-8)


def test_greedy_needs_dense_blocks_gives_the_exact_count_and_costs_no_more_than_the_scores(monkeypatch):
    scores, greedy = (solve(quadratic(8, 16, seed=4), 0.5, 16, order=order) for order in ("scores", "greedy"))
    assert greedy.true_increase < scores.true_increase
    assert pruned(wide_mlp(), 0.5, order="greedy").num_removed == 144
    assert pruned(wide_mlp(), 0.5, order="greedy", scope="layer").num_removed == 144
    monkeypatch.setattr("mfac.pruning.curvature.WIDE_PIECE", 0)
    with pytest.raises(ValueError, match='order="greedy" works on dense blocks; give a block_size'):
        pruned(wide_mlp(), 0.5, order="greedy", block_size=None)

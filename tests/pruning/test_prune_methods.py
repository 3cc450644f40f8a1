"""Magnitude and the diagonal of the Fisher matrix against their formulas, and other ways to take gradients."""

import pytest
import torch
from models import cross_entropy
from pruning_cases import DAMPING, lowest, quadratic, small, solve, zeros

from experiments.baselines.pruning import BASELINES
from experiments.baselines.pruning import prune as prune_with_baselines
from mfac.pruning import prune
from mfac.pruning.options import METHODS

QUICK = {"damping": 1e-5, "num_grads": 3, "recomputations": 3, "block_size": 16, "progress": False}


@pytest.mark.parametrize("method", [*METHODS, *sorted(BASELINES)])
@pytest.mark.parametrize(("update", "scope"), [("joint", "global"), ("obs", "layer"), ("none", "global")])
def test_every_method_gives_exact_counts(method, update, scope):
    model, batches = small()
    options = QUICK | {"method": method, "update": update, "scope": scope}
    result = prune_with_baselines(model, cross_entropy, batches, 0.55, **options)
    assert result.num_removed == round(0.55 * 180)
    assert zeros(model) == result.num_removed
    assert len(result.history) == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_magnitude_takes_the_smallest_and_moves_nothing():
    model, batches = small()
    weights = [model[0].weight.detach().clone(), model[3].weight.detach().clone()]
    result = prune(model, cross_entropy, batches, 0.5, method="magnitude", num_grads=3, recomputations=1)
    removed = lowest([weight.abs() for weight in weights], 0.5)
    for weight, gone, (name, mask) in zip(weights, removed, result.masks.items(), strict=True):
        assert torch.equal(~gone, mask)
        assert torch.equal(dict(model.named_parameters())[name], torch.where(mask, weight, 0.0))
    assert result.predicted_increase is None
    assert result.history[0].damping is None


def test_the_diagonal_fisher_is_the_mean_of_squared_gradients():
    problem = quadratic(8, 1)
    result = solve(problem, 0.5, 128, method="diagonal")
    scores = problem.theta.square() * (problem.rows.square().mean(0) + DAMPING) / 2
    gone = lowest([scores], 0.5)[0]
    assert torch.equal(~gone, torch.cat([mask.flatten() for mask in result.masks.values()]))
    assert result.predicted_increase == pytest.approx(float(scores[gone].sum()))
    assert result.true_increase == pytest.approx(result.predicted_increase)

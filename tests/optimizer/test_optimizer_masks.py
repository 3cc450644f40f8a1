"""Optimizers of pruned networks: masks in every form, wrong ones, and zeros that stay zero."""

import copy

import pytest
import torch
from optimizers import (
    SETTINGS,
    mask_of,
    masked,
    mfac,
    network,
    same,
    train,
    weights,
)

from mfac import MFAC, MFACPreconditioner

# Masks.


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        (
            lambda model: {"0.wieght": mask_of(model[0].weight)},
            r"'0.wieght' is not a parameter .*; it has 0.weight, 0.bi",
        ),
        (lambda model: {0: mask_of(model[0].weight)}, r"masks: 0 is not a parameter of the optimizer"),
        (lambda model: {torch.ones(2, 2): mask_of(model[0].weight)}, r"a tensor of shape \(2, 2\) is not a parameter"),
        (lambda model: {"0.weight": mask_of(model[2].weight)}, r"'0.weight' needs a bool tensor of shape \(7, 5\)"),
        (
            lambda model: {"0.weight": mask_of(model[0].weight).float()},
            r"needs a bool tensor .* torch.float32 of shape",
        ),
        (lambda model: {"0.weight": [True, False]}, r"'0.weight' needs a bool tensor \(True = kept\), not list"),
        (lambda model: [mask_of(model[0].weight)], r"masks must be \{parameter or name: bool tensor\}, not list"),
        (
            lambda model: {"0.weight": mask_of(model[0].weight)},
            r"0.weight has 12 weights that are not zero where its mask",
        ),
        (
            lambda model: {n: torch.zeros_like(p, dtype=torch.bool) for n, p in model.named_parameters()},
            "masks keep no coordinate at all",
        ),
    ],
)
@pytest.mark.parametrize("build", [mfac, MFACPreconditioner])
def test_wrong_masks(build, masks, words):
    model = network()
    with pytest.raises(ValueError, match=words):
        build(model.named_parameters(), masks=masks(model))


def test_a_mask_that_is_changed_later_is_not_the_optimizer_s():
    model = network()
    mask = mask_of(model[0].weight)
    kept = mask.clone()
    model[0].weight.data.mul_(mask)
    optimizer = mfac(model.named_parameters(), masks={"0.weight": mask})
    mask.fill_(True)
    train(model, optimizer, range(3))
    assert torch.equal(optimizer.state_dict()["state"][0]["mask"], kept)
    assert not model[0].weight[~kept].any()


def test_a_mask_of_a_frozen_parameter_counts_once_it_is_thawed():
    model = network()
    mask = mask_of(model[0].weight)
    model[0].weight.data.mul_(mask)
    model[0].weight.requires_grad_(False)
    optimizer = mfac(model.named_parameters(), masks={"0.weight": mask})
    train(model, optimizer, range(3))
    model[0].weight.requires_grad_(True)
    before = weights(model)
    train(model, optimizer, range(3, 6))
    assert not model[0].weight[~mask].any()
    assert (model[0].weight != before[0])[mask].all()


def test_a_parameter_that_is_pruned_altogether_stays_zero():
    model = network()
    model[2].bias.data.zero_()
    optimizer = mfac(model.named_parameters(), masks={"2.bias": torch.zeros(3, dtype=torch.bool)}, momentum=0.9)
    train(model, optimizer, range(7))
    assert not model[2].bias.any()
    fresh = mfac(model.named_parameters(), masks={"2.bias": torch.zeros(3, dtype=torch.bool)}, momentum=0.9)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


# Weights that were pruned.


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"max_step_norm": 0.01}],
)
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_pruned_weights_stay_exactly_zero(options, momentum):
    model = network()
    optimizer = masked(model.parameters(), **options, **momentum)
    pruned = model[0].weight == 0
    before = weights(model)
    train(model, optimizer, range(12))
    assert pruned.sum() == 12
    assert not model[0].weight[pruned].any()
    assert (model[0].weight[~pruned] != before[0][~pruned]).all()


def test_only_kept_weights_are_in_the_window():
    """The steps are those of a model that never had the others."""
    torch.manual_seed(3)
    full, keep = torch.randn(12, dtype=torch.float64), torch.arange(12) % 3 > 0
    pruned, small = (full * keep).requires_grad_(), full[keep].clone().requires_grad_()
    optimizers = [MFAC([pruned], **SETTINGS, masks={pruned: keep}), MFAC([small], **SETTINGS)]
    for _ in range(12):
        pruned.grad = torch.randn(12, dtype=torch.float64)
        small.grad = pruned.grad[keep]
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(pruned[keep], small)
    assert optimizers[0].state_dict()["state"][0]["rows"].shape == (5, 8)

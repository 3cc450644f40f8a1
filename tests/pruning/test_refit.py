"""Refitting: a pruned model is brought back to the outputs of the dense one, or left as it was."""

import copy

import pytest
import torch
from states import same, state_of
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.pruning.refit import divergence

SQUARED, SOFTMAX = (mfac.criterion_loss(criterion) for criterion in (nn.MSELoss(), nn.CrossEntropyLoss()))


def regression():
    """A linear model in float64, inputs that are correlated, and a mask that keeps a half."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, generator=generator, dtype=torch.float64)
    inputs[:, 3:] += inputs[:, :3]
    torch.manual_seed(0)
    dense = nn.Linear(6, 2).double()
    model = copy.deepcopy(dense)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
    with torch.no_grad():
        model.weight.mul_(mask)
    return model, dense, inputs, {"weight": mask}


def test_it_finds_the_least_squares_fit_of_the_kept_weights():
    model, dense, inputs, masks = regression()
    batches = [(part, torch.zeros(len(part), 2).double()) for part in inputs.split(32)]
    means = mfac.refit(model, dense, SQUARED, batches, masks, passes=400, lr=0.1)
    aim, best = dense(inputs).detach(), 0.0
    for kept, wanted in zip(masks["weight"], aim.T, strict=True):
        known = torch.cat((inputs[:, kept], torch.ones(96, 1).double()), 1)
        best += float((known @ torch.linalg.lstsq(known, wanted).solution - wanted).square().sum()) / aim.numel()
    found = F.mse_loss(model(inputs), aim).item()
    assert best <= found < 1.001 * best
    assert means[-1] < means[0]
    assert not model.weight[~masks["weight"]].any()


def test_divergences_are_those_of_the_distributions():
    model, dense, inputs, _ = regression()
    z, aim = model(inputs), dense(inputs).detach()
    labels = torch.zeros(96).long()
    labels[::3] = -100
    p, q = (x.softmax(1)[labels == 0] for x in (aim, z))
    expected = (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(divergence(SOFTMAX, model, dense, (inputs, labels), 0), expected)
    p, q = aim.sigmoid(), z.sigmoid()
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    sigmoid = mfac.criterion_loss(nn.BCEWithLogitsLoss())
    torch.testing.assert_close(divergence(sigmoid, model, dense, (inputs, aim), 0), expected)


def normed():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    model = nn.Sequential(*layers)
    model(torch.randn(64, 6))
    return model


def test_everything_but_the_trained_weights_is_left_alone():
    model, batches = normed(), [(torch.randn(32, 6), torch.randint(3, (32,))) for _ in range(4)]
    dense = copy.deepcopy(model).eval()
    masks = mfac.prune(model, SOFTMAX, batches, 0.7, recomputations=2, seed=0).masks
    model[4].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, random = copy.deepcopy(model), torch.get_rng_state()
    means = mfac.refit(model, dense, SOFTMAX, batches, masks)
    assert means[-1] < means[0]
    assert model.training
    assert not dense.training
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert torch.equal(model[4].bias, before[4].bias)
    assert not torch.equal(model[1].weight, before[1].weight)
    assert all(not dict(model.named_parameters())[name][~mask].any() for name, mask in masks.items())
    hidden = torch.cat([model[0](inputs) for inputs, _ in batches])
    torch.testing.assert_close(model[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_leaves_the_model_as_it_was(error):
    model, batches = normed(), [(torch.randn(32, 6), torch.randint(3, (32,))) for _ in range(4)]
    dense, kept, calls = copy.deepcopy(model), state_of(model), []

    def fail(module, inputs):
        calls.append(module)
        if len(calls) == 7:
            raise error

    model.register_forward_pre_hook(fail)
    with pytest.raises(error):
        mfac.refit(model, dense, SOFTMAX, batches, {})
    assert same(state_of(model), kept)


def test_a_divergence_that_is_not_finite_is_an_error_and_undone():
    model, dense, inputs, masks = regression()
    kept = state_of(model)
    with pytest.raises(RuntimeError, match=r"divergence of the outputs became (inf|nan), and the model is as before"):
        mfac.refit(model, dense, SQUARED, [(inputs * 1e200, inputs[:, :2])] * 2, masks, lr=1e200)
    assert same(state_of(model), kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dense": None}, "dense is the model itself; keep a copy.deepcopy"),
        ({"batches": []}, "batches is empty"),
        ({"passes": 0}, "passes must be a positive int, not 0"),
        ({"loss_fn": lambda model, batch: model(batch).sum()}, "refit cannot tell the model's outputs from this loss"),
        ({"masks": {"bias": torch.ones(3)}}, "bias"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit(change, words):
    model, dense, inputs, masks = regression()
    given = {"dense": dense, "loss_fn": SQUARED, "batches": [(inputs, inputs[:, :2])], "masks": masks} | change
    given["dense"] = given["dense"] or model
    with pytest.raises(ValueError, match=words):
        mfac.refit(model, **given)

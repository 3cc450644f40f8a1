"""Refitting: a pruned model is brought back to the outputs of the dense one, or left as it was."""

import copy
import sys

import pytest
import torch
from models import cross_entropy
from states import same, state_of, unchanged
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.pruning import Pruner, PruningOptions
from mfac.pruning.refit import divergence

SQUARED, SOFTMAX = (mfac.criterion_loss(criterion) for criterion in (nn.MSELoss(), nn.CrossEntropyLoss()))


def regression():
    """A linear model in float64, inputs that are correlated, and a mask that keeps a half."""
    inputs = torch.randn(96, 6, dtype=torch.float64)
    inputs[:, 3:] += inputs[:, :3]
    dense = nn.Linear(6, 2).double()
    model = copy.deepcopy(dense)
    masks = {"weight": torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()}
    mfac.apply_masks(model, masks)
    return model, dense, inputs, masks


def test_it_finds_the_least_squares_fit_of_the_kept_weights():
    model, dense, inputs, masks = regression()
    batches = [(part, torch.zeros(len(part), 2).double()) for part in inputs.split(32)]
    means = mfac.refit(model, dense, SQUARED, batches, masks, passes=400, lr=0.1)
    aim, best = dense(inputs).detach(), 0.0
    for kept, wanted in zip(masks["weight"], aim.T, strict=True):
        known = torch.cat((inputs[:, kept], torch.ones(96, 1).double()), 1)
        best += float((known @ torch.linalg.lstsq(known, wanted).solution - wanted).square().sum()) / aim.numel()
    assert best <= F.mse_loss(model(inputs), aim).item() < 1.001 * best
    assert means[-1] < means[0]
    assert not model.weight[~masks["weight"]].any()


def test_divergences_are_those_of_the_distributions():
    model, dense, inputs, _ = regression()
    z, aim = model(inputs), dense(inputs).detach()
    labels = torch.tensor([-100, 0, 0] * 32)
    p, q = (x.softmax(1)[labels == 0] for x in (aim, z))
    expected = (p * (p / q).log()).sum(1).mean()
    sigmoid = mfac.criterion_loss(nn.BCEWithLogitsLoss())
    softmax, sigmoid = (loss.reading(model, (), "refit") for loss in (SOFTMAX, sigmoid))
    torch.testing.assert_close(divergence(softmax, model, dense, (inputs, labels)), expected)
    assert divergence(softmax, model, dense, (inputs, torch.full_like(labels, -100))) == 0
    p, q = aim.sigmoid(), z.sigmoid()
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    torch.testing.assert_close(divergence(sigmoid, model, dense, (inputs, aim)), expected)


def normed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
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
    dense, calls = copy.deepcopy(model), []

    def fail(module, inputs):
        calls.append(module)
        if len(calls) == 7:
            raise error

    model.register_forward_pre_hook(fail)
    with unchanged(model), pytest.raises(error):
        mfac.refit(model, dense, SOFTMAX, batches, {})


def test_a_divergence_that_is_not_finite_is_an_error_and_undone():
    model, dense, inputs, masks = regression()
    message = r"divergence of the outputs became (inf|nan), and the model is unchanged"
    with unchanged(model), pytest.raises(RuntimeError, match=message):
        mfac.refit(model, dense, SQUARED, [(inputs * 1e200, inputs[:, :2])] * 2, masks, lr=1e200)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dense": None}, "dense is the model itself, or shares its weights; keep a copy.deepcopy"),
        ({"dense": nn.Sequential}, "dense is the model itself, or shares its weights; keep a copy.deepcopy"),
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
    given["dense"] = nn.Sequential(model) if given["dense"] is nn.Sequential else given["dense"] or model
    with pytest.raises(ValueError, match=words):
        mfac.refit(model, **given)
    with pytest.raises(ValueError, match="the model has no trainable parameter"):
        mfac.refit(model.requires_grad_(False), dense, SQUARED, [(inputs, inputs[:, :2])], masks)


BATCHES = [(torch.randn(32, 6, generator=torch.Generator().manual_seed(k)), torch.arange(32) % 3) for k in range(16)]


def pruned(model=None, loss_fn=SOFTMAX, **options):
    model = normed() if model is None else model
    options = {"recomputations": 2, "seed": 0} | options
    return model, mfac.prune(model, loss_fn, BATCHES, 0.7, **options).masks


@torch.no_grad()
def distance(model):
    inputs = torch.cat([inputs for inputs, _ in BATCHES])
    outputs = (each.eval()(inputs).log_softmax(1) for each in (model, normed()))
    return F.kl_div(*outputs, log_target=True, reduction="batchmean")


@pytest.mark.parametrize(("options", "share"), [({}, 0.9), ({"method": "magnitude", "refit": True}, 0.8)], ids=str)
def test_pruning_ends_with_a_refit_that_brings_the_outputs_closer(options, share):
    (model, masks), (plain, same_masks) = pruned(**options), pruned(**options | {"refit": False})
    assert same(masks, same_masks)
    assert distance(model) < share * distance(plain)
    assert not torch.equal(model[4].bias, plain[4].bias)
    assert all(not model.get_parameter(name)[~mask].any() for name, mask in masks.items())


OTHERS = {"update": "joint", "recalibrate": False, "fisher": "empirical", "block_size": 8, "method": "magnitude"}


@pytest.mark.parametrize(("option", "value"), [*OTHERS.items(), ("loss_fn", cross_entropy)])
def test_it_is_part_of_the_default_method_only(option, value):
    assert same(state_of(pruned(**{option: value})[0]), state_of(pruned(**{option: value}, refit=False)[0]))


def test_a_refit_that_does_not_help_is_undone_and_one_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["mfac.pruning.refit"], "RATES", (1e3, 1e30))
    assert same(state_of(pruned()[0]), state_of(pruned(refit=False)[0]))
    with pytest.raises(ValueError, match='refit must be "auto", True or False, not 3'):
        pruned(refit=3)
    with pytest.raises(ValueError, match="refit=True cannot tell the model's outputs from this loss"):
        pruned(loss_fn=cross_entropy, refit=True)


def test_frozen_weights_stay_and_the_others_are_refitted():
    model = normed()
    model[0].requires_grad_(False)
    result = mfac.prune(model, SOFTMAX, BATCHES, 0.8, targets="0.weight", recomputations=1, refit=False)
    dense, frozen, free = copy.deepcopy(model), model[0].weight.clone(), model[4].weight.clone()
    dense[0].weight.data += 0.1
    mfac.refit(model, dense, SOFTMAX, BATCHES, result.masks)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[4].weight, free)
    assert mfac.prune(dense, SOFTMAX, BATCHES, 0.8, targets="0.weight", recomputations=1).sparsity == result.sparsity


def test_a_model_that_cannot_be_copied_is_not_refitted():
    model = normed()
    model.handle = (number for number in range(3))
    with pytest.warns(UserWarning, match="cannot be copied .*so it is not refitted; refit=False says so"):
        pruned(model)
    del model.handle
    assert same(state_of(model), state_of(pruned(refit=False)[0]))


def test_a_run_is_resumed_from_the_dense_weights():
    model, options = normed(), PruningOptions(recomputations=2, seed=0)
    pruner = Pruner(model, SOFTMAX, BATCHES, 0.7, options)
    pruner.step()
    state, weights = pruner.state_dict(), state_of(model)
    other = Pruner(model, SOFTMAX, BATCHES, 0.7, options)
    with pytest.raises(ValueError, match="began with other weights; build the Pruner with the model as it was before"):
        other.load_state_dict(state)
    model = normed()
    resumed = Pruner(model, SOFTMAX, BATCHES, 0.7, options)
    resumed.load_state_dict(state)
    model.load_state_dict(weights)
    resumed.run()
    assert same(state_of(model), state_of(pruned()[0]))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_pruning_and_refitting_where_gradients_are_off(context):
    model, twin, dense = normed(), normed(), normed()
    with context():
        mfac.refit(model, dense, SOFTMAX, BATCHES, pruned(model)[1])
    mfac.refit(twin, dense, SOFTMAX, BATCHES, pruned(twin)[1])
    assert same(state_of(model), state_of(twin))


class Slope(nn.Sequential):
    def forward(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:per-sample gradients are taken one by one")
def test_a_model_that_differentiates_is_pruned_and_refitted():
    model, inputs = Slope(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(64, 3)
    batches, twin = [(x, x) for x in inputs.split(8)], copy.deepcopy(model)
    for some, refit in ((model, True), (twin, False)):
        mfac.prune(some, SQUARED, batches, 0.5, recomputations=1, refit=refit)
    assert not same(state_of(model), state_of(twin))

"""The model, its buffers and gradients, and every random state are left as they were found, whatever happens."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from models import cnn, cross_entropy, failing_loss, mlp, noisy
from states import same
from torch import nn

from mfac.gradients import collect_gradients


class Careless(nn.Module):
    """Draws, counts, replaces a buffer, and lives in a mix of training modes."""

    def __init__(self):
        super().__init__()
        self.body = cnn().model
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.body[1].running_mean = torch.zeros(4)
        self.seen = x.shape
        torch.rand(3), np.random.rand(), random.random()
        return self.body(x)


def snapshot(model):
    return {
        "flags": [module.training for module in model.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "objects": [id(p.grad) for p in model.parameters()] + [id(b) for b in model.buffers()],
        "buffers": [b.clone() for b in model.buffers()],
        "random": [torch.get_rng_state(), random.random.__self__.getstate(), np.random.get_state()[1].tolist()],
    }


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
def test_the_model_is_left_as_it_was_found(per_sample, failure):
    model, batch = Careless().train(), cnn().batch
    model.body[1].eval()
    model.body[0].weight.grad = torch.ones(4, 3, 3, 3)
    before = snapshot(model)
    loss_fn = cross_entropy if failure is None else failing_loss(2, failure("stop"))
    with nullcontext() if failure is None else pytest.raises(failure, match="stop"):
        collect_gradients(model, loss_fn, [batch] * 3, 3, per_sample=per_sample, method="loop")
    assert same(snapshot(model), before)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("per_sample", [False, True])
def test_called_where_gradients_are_off(context, per_sample):
    case = mlp()
    expected = collect_gradients(case.model, case.loss_fn, [case.batch], 1, per_sample=per_sample)
    with context():
        rows = collect_gradients(case.model, case.loss_fn, [case.batch], 1, per_sample=per_sample)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"per_sample": True}, {"fisher": "sampled", "output_fn": lambda m, b: m(b[0]) + torch.randn(3)}],
    ids=["batches", "samples", "drawn labels"],
)
def test_batches_that_are_drawn_at_random_are_not_disturbed_by_the_rows(options):
    case = mlp(4)
    seen = []

    def drawn():
        while True:
            seen.append(torch.randn(4, 5))
            yield seen[-1], case.batch[1]

    torch.manual_seed(3)
    collect_gradients(case.model, noisy, drawn(), 20, **options)
    torch.manual_seed(3)
    assert len(seen) == (5 if "per_sample" in options else 20)
    assert all(torch.equal(inputs, torch.randn(4, 5)) for inputs in seen)


@pytest.mark.parametrize("per_sample", [False, True])
def test_what_a_loss_draws_is_the_same_for_a_list_and_for_an_iterator(per_sample):
    case = mlp(4)
    before = torch.get_rng_state()
    batches = 5 * [case.batch]
    rows = collect_gradients(case.model, noisy, batches, 5, per_sample=per_sample)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(collect_gradients(case.model, noisy, iter(batches), 5, per_sample=per_sample), rows)
    assert len(rows.unique(dim=0)) == 5


@pytest.mark.parametrize("per_sample", [False, True])
def test_gradients_of_frozen_parameters_that_are_named(per_sample):
    case = mlp()
    options = {"params": ["0.weight", "2.bias"], "per_sample": per_sample}
    expected = collect_gradients(case.model, cross_entropy, [case.batch], 1, **options)
    case.model[0].requires_grad_(False)
    assert torch.equal(collect_gradients(case.model, cross_entropy, [case.batch], 1, **options), expected)
    with pytest.raises(KeyError):
        collect_gradients(case.model, lambda m, b: b["none"], [{"x": torch.zeros(1)}], 1, **options)
    assert [p.requires_grad for p in case.model.parameters()] == [False, False, True, True]


def test_a_second_thread_on_one_model_is_refused():
    case = mlp()

    def loss_fn(model, batch):
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="another thread is computing grad"):
            pool.submit(collect_gradients, model[0], cross_entropy, [case.batch], 1).result()
        other = mlp()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collect_gradients, other.model, cross_entropy, [case.batch], 1).result()
        collect_gradients(model, cross_entropy, [batch], 1)  # the same thread may
        return cross_entropy(model, batch)

    case.model.train()
    rows = collect_gradients(case.model, loss_fn, [case.batch], 1)
    assert torch.equal(rows, collect_gradients(case.model, cross_entropy, [case.batch], 1))
    assert all(module.training for module in case.model.modules())

"""Wrong arguments and gradients that cannot be used: what is said, and that nothing is lost."""

import copy

import pytest
import torch
from optimizers import (
    every_optimizer,
    loss_of,
    mfac,
    network,
    ready,
    same,
    train,
    weights,
)
from torch import nn

from mfac import MFACPreconditioner

# Arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr must be 0 or more, not -0.1"),
        ({"lr": float("nan")}, "lr must be 0 or more, not nan"),
        ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one element, not one of 2"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"nesterov": True}, "nesterov needs a momentum, and momentum is 0; pass one"),
        ({"weight_decay": -1e-3}, "weight_decay must be 0 or more, not -0.001"),
        ({"num_grads": 0}, "num_grads must be a positive int, not 0"),
        ({"damping": 0.0}, "damping must be"),
        ({"damping": lambda step: -1.0}, "damping must be"),
        ({"normalize": "none"}, "normalize must be 'seen', 'full' or 'sum', not 'none'"),
        ({"window": torch.int32}, r"rows can be stored in torch.float32, .*, not torch.int32"),
        ({"window": "bfloat16"}, "rows can be stored in .*, not 'bfloat16'"),
        ({"update_every": 0}, "update_every must be a positive int, not 0"),
        ({"max_step_norm": 0.0}, "max_step_norm must be positive, or None for steps of any length, not 0.0"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'skip', not 'ignore'"),
        ({"precision": "float16"}, "precision must be"),
    ],
)
def test_arguments_out_of_their_range(options, words):
    with pytest.raises(ValueError, match=words):
        mfac(network().parameters(), **options)


def test_there_must_be_something_to_train():
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="none of the parameters is trainable; call requires_grad_"):
        mfac(frozen.parameters())
    with pytest.raises(ValueError, match=r"none of the parameters is trainable"):
        MFACPreconditioner(frozen.parameters())


def test_complex_parameters_are_refused():
    parameter = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    for build in (mfac, MFACPreconditioner):
        with pytest.raises(
            ValueError, match=r"w is torch.complex64; only real floating-point parameters can be trained"
        ):
            build([("w", parameter)])


# Gradients that cannot be used.


@every_optimizer
@pytest.mark.parametrize(("steps", "value"), [(0, float("nan")), (8, -float("inf"))])
def test_a_gradient_that_is_not_finite_is_an_error_that_changes_nothing(build, steps, value):
    model, optimizer = ready(build, steps)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    good = [parameter.grad.clone() for parameter in model.parameters()]
    model[2].weight.grad[1, 2] = value
    with pytest.raises(RuntimeError, match=r"the gradient is not finite.*skip this step"):
        optimizer.step()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)
    for parameter, gradient in zip(model.parameters(), good, strict=True):
        parameter.grad = gradient
    optimizer.step()
    train(model, optimizer, range(steps + 1, steps + 4))
    undisturbed = network()
    train(undisturbed, build(undisturbed.named_parameters()), range(steps + 4))
    assert same(weights(model), weights(undisturbed))


@every_optimizer
def test_gradients_that_are_not_finite_are_skipped_and_counted(build):
    model, optimizer = ready(build, 3, nonfinite="skip")
    for step in range(3, 9):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before = weights(model)
        if step in (4, 5):
            model[0].bias.grad[0] = torch.nan
        optimizer.step()
        assert same(before, weights(model)) is (step in (4, 5))
    assert optimizer.skipped == 2
    assert optimizer.diagnostics()["skipped"] == 2
    other = network()
    train(other, build(other.named_parameters()), [0, 1, 2, 3, 6, 7, 8])
    assert same(weights(model), weights(other))
    fresh = build(other.named_parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.skipped == 2


def test_a_schedule_of_the_damping_waits_for_a_gradient_that_is_finite():
    model, optimizer = ready(mfac, 6, damping=lambda step: 0.1 if step < 6 else 0.5)
    state = copy.deepcopy(optimizer.state_dict())
    model[0].bias.grad[0] = torch.inf
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert optimizer.damping == 0.1
    assert same(optimizer.state_dict(), state)
    model[0].bias.grad[0] = 0.0
    optimizer.step()
    assert optimizer.damping == 0.5


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    optimizer = mfac(model.named_parameters())
    preconditioner = MFACPreconditioner(model.named_parameters(), 4)
    model(torch.tensor([1, 2])).sum().backward()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        RuntimeError, match=r"sparse gradients are not supported, and 0\.weight has one; .*sparse=False"
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"sparse gradients are not supported, and 0\.weight has one"):
        preconditioner.step()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)


def test_a_gradient_too_large_for_the_storage_is_not_finite():
    model, optimizer = ready(mfac, 2, window=torch.float16)
    model[0].bias.grad[0] = 1e6
    with pytest.raises(RuntimeError, match=r"squared norm in torch.float16 is inf"):
        optimizer.step()

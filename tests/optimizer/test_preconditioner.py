"""The preconditioner by itself: where it differs from the optimizer, and its state."""

import copy

import pytest
import torch
from optimizers import loss_of, mfac, network, trained
from states import same, through_a_file, weights

from mfac import MFACPreconditioner


def precondition(model, preconditioner, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        preconditioner.step()
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 8])
def test_a_preconditioner_saved_and_loaded_continues_bit_for_bit(steps):
    def build(model):
        options = {"num_grads": 5, "damping": 0.1, "update_every": 2}
        return MFACPreconditioner(model.parameters(), **options), torch.optim.SGD(model.parameters(), 0.02)

    model = network()
    pair = build(model)
    precondition(model, *pair, range(steps))
    twin = copy.deepcopy(model)
    fresh = build(twin)
    fresh[0].load_state_dict(through_a_file(pair[0].state_dict()))
    assert same(fresh[0].state_dict(), pair[0].state_dict())
    precondition(model, *pair, range(steps, steps + 6))
    precondition(twin, *fresh, range(steps, steps + 6))
    assert same(weights(twin), weights(model))


def test_a_preconditioner_refuses_the_state_of_something_else():
    model, optimizer = trained(mfac, 3)
    preconditioner = MFACPreconditioner(model.parameters(), 5)
    with pytest.raises(ValueError, match="not a state of MFACPreconditioner: it has no window; did an optimizer save"):
        preconditioner.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="this state has no window"):
        optimizer.load_state_dict(preconditioner.state_dict())
    with pytest.raises(ValueError, match="the state is of 1 parameters, and there are 4 here"):
        preconditioner.load_state_dict(MFACPreconditioner([model[0].weight], 5).state_dict())
    with pytest.raises(ValueError, match="saved with num_grads=6, this window has num_grads=5"):
        preconditioner.load_state_dict(MFACPreconditioner(model.parameters(), 6).state_dict())


def test_preconditioned_gradients_are_a_dense_inverse_times_the_gradient():
    model, rows = network().double(), []
    preconditioner = MFACPreconditioner(model.parameters(), 4, 0.1)
    for step in range(6):
        model.zero_grad()
        loss_of(model, step).backward()
        rows = [*rows[-3:], torch.cat([parameter.grad.flatten() for parameter in model.parameters()])]
        assert preconditioner.step()
        found, G = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), torch.stack(rows)
        F = 0.1 * torch.eye(len(found), dtype=G.dtype) + G.T @ G / 4
        torch.testing.assert_close(found, torch.linalg.solve(F, rows[-1]), rtol=1e-9, atol=1e-12)


def test_a_preconditioner_leaves_bad_gradients_unchanged_works_in_place_and_keeps_none():
    model = network()
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
    preconditioner = MFACPreconditioner(groups, 4, 0.1, nonfinite="skip")
    assert not preconditioner.step()
    loss_of(model, 0).backward()
    model[0].bias.grad[0] = torch.inf
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    assert not preconditioner.step()
    assert preconditioner.skipped == 1
    assert same([parameter.grad for parameter in model.parameters()], grads)
    model[0].bias.grad[0] = 1.0
    model[2].bias.grad = None
    before = [parameter.grad for parameter in model.parameters()]
    copies = [None if gradient is None else gradient.clone() for gradient in before]
    assert preconditioner.step()
    for parameter, gradient, old in zip(model.parameters(), before, copies, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or not torch.equal(gradient, old)

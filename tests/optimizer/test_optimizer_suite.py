"""What users expect of any torch optimizer, for every optimizer class of the package."""

import copy
import pickle

import pytest
import torch
from optimizers import DECAYING, OPTIMIZERS, every_optimizer, loss_of, mfac, network, some_optimizers, train, trained
from states import moved, same, unchanged, weights
from torch import nn
from torch.optim import lr_scheduler

from mfac import MFAC


@every_optimizer
def test_goes_downhill_and_with_maximize_uphill(build):
    for maximize in (False, True):
        model = network()
        losses = train(model, build(model.parameters(), maximize=maximize), [0] * 20)
        assert (losses[-1] > losses[0]) is maximize


@every_optimizer
def test_zero_gradients_move_nothing_but_by_decay(build, request):
    model = network()
    optimizer = build(model.parameters())
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    assert any(moved(before, model)) is (request.node.callspec.id in DECAYING)


@every_optimizer
def test_options_of_groups_equal_to_those_of_the_optimizer(build):
    options = {"lr": 0.01, "weight_decay": 0.05}
    model = network()
    optimizer = build([{"params": layer.parameters(), **options} for layer in (model[0], model[2])])
    train(model, optimizer, range(7))
    assert same(weights(model), weights(trained(build, 7, **options)[0]))


def test_groups_with_their_own_decay_momentum_and_direction():
    params = [torch.randn(4, dtype=torch.float64).requires_grad_() for _ in range(5)]
    groups = [
        {"params": params[0], "weight_decay": 0.5},
        {"params": params[1], "weight_decay": 0.5e-12, "decoupled_weight_decay": True, "lr": 0.25e12},
        {"params": params[2], "maximize": True},
        {"params": params[3], "momentum": 0.75},
        {"params": params[4], "lr": 0.0},
    ]
    optimizer = MFAC(groups, lr=1e12, num_grads=2, damping=1e12)  # F⁻¹g is g/λ here, to 1e-11
    w = [tensor.detach().clone() for tensor in params]
    g = [torch.randn(4, dtype=torch.float64) for _ in params]
    for tensor, gradient in zip(params, g, strict=True):
        tensor.grad = gradient.clone()
    optimizer.step()
    expected = [w[0] - g[0] - 0.5 * w[0], w[1] * 0.875 - 0.25 * g[1], w[2] + g[2], w[3] - 0.25 * g[3], w[4]]
    for tensor, value in zip(params, expected, strict=True):
        torch.testing.assert_close(tensor.detach(), value, rtol=1e-9, atol=1e-10)


@every_optimizer
def test_a_closure_gives_its_loss_and_the_same_steps_and_gradients_are_unchanged(build):
    model, grads = network(), []
    optimizer = build(model.parameters())

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, len(grads))
        loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        return loss

    losses = []
    for _ in range(6):
        losses.append(optimizer.step(closure).item())
        assert same([parameter.grad for parameter in model.parameters()], grads[-1])
    other = network()
    assert losses == train(other, build(other.parameters()), range(6))
    assert same(weights(model), weights(other))
    assert optimizer.step() is None


@every_optimizer
def test_without_any_gradient_or_with_a_closure_that_fails_a_step_changes_nothing(build):
    model, optimizer = trained(build, 3)
    optimizer.zero_grad()
    with unchanged(model, optimizer):
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)


@every_optimizer
def test_a_parameter_without_a_gradient_does_not_move_and_is_not_frozen(build):
    model, optimizer = trained(build, 6)
    optimizer.zero_grad()
    before = weights(model)
    loss_of(model, 9).backward()
    model[0].weight.grad = model[2].bias.grad = None
    optimizer.step()
    assert moved(before, model) == [False, True, True, False]
    before = weights(model)
    loss_of(model, 10).backward()
    optimizer.step()
    assert all(moved(before, model))


@every_optimizer
def test_a_gradient_scaler_and_a_step_that_overflows(build):
    model = network()
    optimizer = build(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        if step == 5:
            model[0].bias.grad[2] = torch.inf
        if step == 6:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert same(before, weights(model)) is (step == 5)
        assert same(state, optimizer.state_dict()) is (step == 5)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deep_copies_and_pickles_continue_on_their_own(name):
    model, optimizer = trained(OPTIMIZERS[name], 9)
    pairs = [copy.deepcopy((model, optimizer))]
    if name != "damping_schedule":  # a lambda
        pairs.append(pickle.loads(pickle.dumps((model, optimizer))))
    state = copy.deepcopy(optimizer.state_dict())
    for twin, copied in pairs:
        train(twin, copied, range(9, 15))
    assert same(optimizer.state_dict(), state)
    train(model, optimizer, range(9, 15))
    for twin, copied in pairs:
        assert same(weights(twin), weights(model))
        assert same(copied.state_dict(), optimizer.state_dict())
        copied.add_param_group({"params": nn.Linear(2, 2).named_parameters()})


def test_a_scheduler_of_the_learning_rate_and_the_momentum():
    model = network()
    optimizer = mfac(model.parameters(), momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=30)
    losses = []
    for _ in range(12):
        losses += train(model, optimizer, [0])
        scheduler.step()
    assert losses[-1] < losses[0]


@some_optimizers
def test_a_learning_rate_may_be_a_tensor(build):
    rate = torch.full((1,), 0.01)
    model, optimizer = trained(build, 6, lr=rate)
    assert same(weights(model), weights(trained(build, 6, lr=rate.item())[0]))
    assert optimizer.param_groups[0]["lr"] is rate
    fresh = build(network().named_parameters(), lr=torch.tensor(1.0))
    with torch.device("meta"):  # the default device does not matter
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.param_groups[0]["lr"].item() == pytest.approx(0.01)


@some_optimizers
def test_state_hooks_see_and_change_the_whole_state(build):
    """As when the state comes in an envelope that a hook opens."""
    model, optimizer = trained(build, 6)
    plain, calls = optimizer.state_dict(), []

    def close(o, state):
        assert same(state, plain)
        return {"envelope": state}

    def opened(o):
        calls.append("loaded")
        assert same(o.state_dict(), plain)

    optimizer.register_state_dict_post_hook(close)
    fresh = build(copy.deepcopy(model).named_parameters())
    fresh.register_load_state_dict_pre_hook(lambda o, state: state["envelope"])
    fresh.register_load_state_dict_post_hook(opened)
    for _ in range(2):
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == ["loaded"] * 2

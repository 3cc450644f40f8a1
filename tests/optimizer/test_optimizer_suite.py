"""What people expect of any optimizer of torch.optim, for every optimizer class of the package."""

import copy
import pickle

import pytest
import torch
from optimizers import (
    DECAYING,
    OPTIMIZERS,
    every_optimizer,
    loss_of,
    mfac,
    moved,
    network,
    same,
    some_optimizers,
    train,
    trained,
    weights,
)
from torch import nn
from torch.optim import lr_scheduler

from mfac import MFAC


def closure_for(model, optimizer, step=0):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    return closure


# Where it goes.


@every_optimizer
def test_goes_downhill_and_with_maximize_uphill(build):
    for maximize in (False, True):
        model = network()
        optimizer = build(model.parameters(), maximize=maximize)
        losses = train(model, optimizer, [0] * 20)
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


# Groups and their options.


@every_optimizer
def test_a_group_with_lr_0_does_not_move(build):
    model = network()
    optimizer = build([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}])
    before = weights(model)
    train(model, optimizer, range(6))
    assert moved(before, model) == [True, True, False, False]


@every_optimizer
def test_options_of_groups_equal_to_those_of_the_optimizer(build):
    options = {"lr": 0.01, "momentum": 0.7, "weight_decay": 0.05}
    model = network()
    optimizer = build([{"params": layer.parameters(), **options} for layer in (model[0], model[2])])
    train(model, optimizer, range(7))
    assert same(weights(model), weights(trained(build, 7, **options)[0]))


def test_groups_with_their_own_decay_momentum_and_direction():
    torch.manual_seed(1)
    params = [torch.randn(4, dtype=torch.float64).requires_grad_() for _ in range(4)]
    groups = [
        {"params": params[0], "weight_decay": 0.5},
        {"params": params[1], "weight_decay": 0.5e-12, "decoupled_weight_decay": True, "lr": 0.25e12},
        {"params": params[2], "maximize": True},
        {"params": params[3], "momentum": 0.75},
    ]
    optimizer = MFAC(groups, lr=1e12, num_grads=2, damping=1e12)  # F⁻¹g is g/λ here, to 1e-11
    w = [tensor.detach().clone() for tensor in params]
    g = [torch.randn(4, dtype=torch.float64) for _ in params]
    for tensor, gradient in zip(params, g, strict=True):
        tensor.grad = gradient.clone()
    optimizer.step()
    expected = [
        w[0] - (g[0] + 0.5 * w[0]),
        w[1] * (1 - 0.125) - 0.25 * g[1],
        w[2] + g[2],
        w[3] - 0.25 * g[3],
    ]
    for tensor, value in zip(params, expected, strict=True):
        torch.testing.assert_close(tensor.detach(), value, rtol=1e-9, atol=1e-10)


# Closures, gradients that are not there, zero_grad.


@every_optimizer
def test_a_closure_gives_its_loss_and_the_same_steps(build):
    model = network()
    optimizer = build(model.parameters())
    losses = [optimizer.step(closure_for(model, optimizer, step)).item() for step in range(7)]
    other = network()
    assert losses == train(other, build(other.parameters()), range(7))
    assert same(weights(model), weights(other))
    assert optimizer.step() is None


def test_a_closure_runs_with_gradients_on_and_step_leaves_the_mode_alone():
    model, seen = network(), []
    optimizer = mfac(model.parameters())
    with torch.no_grad():
        optimizer.step(lambda: seen.append(torch.is_grad_enabled()))
        assert not torch.is_grad_enabled()
    assert seen == [True]


@every_optimizer
def test_a_closure_that_fails_changes_nothing(build):
    model, optimizer = trained(build, 3)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)


@every_optimizer
def test_without_any_gradient_a_step_changes_nothing(build):
    model, optimizer = trained(build, 3)
    optimizer.zero_grad()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.step()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)


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
def test_gradients_are_left_as_they_were(build):
    model = network()
    optimizer = build(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        assert same([parameter.grad for parameter in model.parameters()], grads)


# Copies.


@every_optimizer
@pytest.mark.parametrize("steps", [0, 9])
def test_a_deep_copy_goes_on_by_itself(build, steps):
    model, optimizer = trained(build, steps)
    twin, copied = copy.deepcopy((model, optimizer))
    assert {name for name in vars(optimizer) if name[0] != "_"} <= set(vars(copied))
    state = copy.deepcopy(optimizer.state_dict())
    train(twin, copied, range(steps, steps + 6))
    assert same(optimizer.state_dict(), state)
    train(model, optimizer, range(steps, steps + 6))
    assert same(weights(twin), weights(model))
    assert same(copied.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "damping_schedule"])  # that is a lambda
@pytest.mark.parametrize("steps", [0, 9])
def test_pickled_and_back_it_goes_on(name, steps):
    model, optimizer = trained(OPTIMIZERS[name], steps)
    twin, copied = pickle.loads(pickle.dumps((model, optimizer)))
    for pair in ((model, optimizer), (twin, copied)):
        train(*pair, range(steps, steps + 6))
    assert same(weights(twin), weights(model))
    copied.add_param_group({"params": nn.Linear(2, 2).parameters()})
    train(twin, copied, range(2))


# Mixed precision.


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
    assert not any(parameter.isnan().any() for parameter in model.parameters())


# Learning rates and hooks.


SCHEDULES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=30),  # cycles the momentum too
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_of_the_learning_rate(schedule):
    model = network()
    optimizer = mfac(model.parameters(), momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer)
    losses, rates = [], set()
    for _ in range(12):
        losses += train(model, optimizer, [0])
        rates.add(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert losses[-1] < losses[0]
    assert len(rates) > 1


@every_optimizer
def test_a_learning_rate_assigned_is_the_one_used(build):
    model, optimizer = trained(build, 5)
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights(model)
    train(model, optimizer, range(5, 8))
    assert not any(moved(before, model))


@some_optimizers
def test_a_learning_rate_may_be_a_tensor(build):
    rate = torch.full((1,), 0.01)
    model, optimizer = trained(build, 6, lr=rate)
    assert same(weights(model), weights(trained(build, 6, lr=rate.item())[0]))
    assert optimizer.param_groups[0]["lr"] is rate
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, [6])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.005)
    fresh = build(network().parameters(), lr=torch.tensor(1.0))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.param_groups[0]["lr"].item() == pytest.approx(0.005)


@every_optimizer
def test_state_dict_hooks_see_and_change_all_of_the_state(build):
    optimizer = trained(build, 4)[1]
    plain = optimizer.state_dict()
    calls = []

    def after(o, state):
        calls.append("after")
        assert same(state, plain)
        return {**state, "note": 1}

    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before"))
    handle = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["note"] == 1
    assert calls == ["before", "after"]
    handle.remove()
    assert "note" not in optimizer.state_dict()
    optimizer.register_state_dict_post_hook(lambda o, state: {"kept": "nothing"})
    assert optimizer.state_dict() == {"kept": "nothing"}


@every_optimizer
def test_load_state_dict_hooks_see_and_change_all_of_the_state(build):
    """As when the state comes in an envelope, and must be got out of it."""
    model, optimizer = trained(build, 6)
    fresh = build(copy.deepcopy(model).parameters())
    calls = []

    def before(o, state):
        calls.append("before")
        return state["envelope"]

    def after(o):
        calls.append("after")
        assert same(o.state_dict(), optimizer.state_dict())

    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(after)
    fresh.load_state_dict({"envelope": copy.deepcopy(optimizer.state_dict())})
    assert calls == ["before", "after"]
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == len(fresh._optimizer_load_state_dict_post_hooks) == 1

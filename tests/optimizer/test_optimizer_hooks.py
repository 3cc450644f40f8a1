"""What reaches into an optimizer from outside: schedulers of the learning rate, and hooks."""

import copy

import pytest
import torch
from optimizers import (
    every_optimizer,
    mfac,
    moved,
    network,
    same,
    some_optimizers,
    train,
    trained,
    weights,
)
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

# Learning rates.


SCHEDULES = {
    "StepLR": lambda o: [lr_scheduler.StepLR(o, 3, 0.5)],
    "LambdaLR": lambda o: [lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))],
    "OneCycleLR": lambda o: [lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=30)],
    "OneCycleLR without momentum": lambda o: [lr_scheduler.OneCycleLR(o, 0.02, total_steps=30, cycle_momentum=False)],
    "CyclicLR": lambda o: [lr_scheduler.CyclicLR(o, 0.001, 0.02, step_size_up=5)],
    "CosineAnnealingLR": lambda o: [lr_scheduler.CosineAnnealingLR(o, 30)],
    "ReduceLROnPlateau": lambda o: [lr_scheduler.ReduceLROnPlateau(o, patience=0)],
    "several": lambda o: [lr_scheduler.ExponentialLR(o, 0.95), lr_scheduler.StepLR(o, 5, 0.9)],
    "chained": lambda o: [
        lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.99)])
    ],
    "sequential": lambda o: [
        lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [5])
    ],
}


@some_optimizers
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_of_the_learning_rate(build, schedule):
    model = network()
    optimizer = build(model.parameters())
    schedulers = SCHEDULES[schedule](optimizer)
    losses, rates = [], set()
    for _ in range(12):
        losses += train(model, optimizer, [0])
        rates.add(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step(*(losses[-1:] if schedule == "ReduceLROnPlateau" else []))
    assert losses[-1] < losses[0]
    assert len(rates) > 1 or schedule == "ReduceLROnPlateau"


@every_optimizer
def test_a_learning_rate_assigned_is_the_one_used(build):
    model, optimizer = trained(build, 5)
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights(model)
    train(model, optimizer, range(5, 8))
    assert not any(moved(before, model))


@every_optimizer
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_may_be_a_tensor(build, shape):
    rate = torch.full(shape, 0.01)
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


# Hooks.


@every_optimizer
def test_step_hooks_run_around_the_step_in_order_until_removed(build):
    model = network()
    optimizer = build(model.parameters())
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before", weights(model)))),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("after", weights(model)))),
        torch_optimizer.register_optimizer_step_pre_hook(lambda o, args, kwargs: calls.append(("all", o))),
    ]
    before = weights(model)
    try:
        train(model, optimizer, range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert [name for name, _ in calls] == ["all", "before", "after"]
    assert same(calls[1][1], before)
    assert same(calls[2][1], weights(model))
    train(model, optimizer, range(1))
    assert len(calls) == 3


def test_a_pre_hook_can_change_the_arguments_of_the_step():
    model = network()
    optimizer = mfac(model.parameters())
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


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

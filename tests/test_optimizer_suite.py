"""What people expect of any optimizer of torch.optim, for every optimizer class of the package."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

from mfac import MFAC
from optimizers import DECAYING, OPTIMIZERS, SETTINGS, SOME, loss_of, masked, mfac, network, same, train, weights

every_optimizer = pytest.mark.parametrize("build", [pytest.param(OPTIMIZERS[name], id=name) for name in OPTIMIZERS])
some_optimizers = pytest.mark.parametrize("build", [pytest.param(OPTIMIZERS[name], id=name) for name in SOME])
without_decay = pytest.mark.parametrize(
    "build", [pytest.param(OPTIMIZERS[name], id=name) for name in OPTIMIZERS if name not in DECAYING]
)


def closure_for(model, optimizer, step=0):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    return closure


def trained(build, steps=8, **options):
    model = network()
    optimizer = build(model.parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def moved(before, model):
    """Which parameters are not what they were."""
    return [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]


# Where it goes.


@every_optimizer
def test_goes_downhill_and_with_maximize_uphill(build):
    for maximize in (False, True):
        model = network()
        optimizer = build(model.parameters(), maximize=maximize)
        losses = train(model, optimizer, [0] * 20)
        assert (losses[-1] > losses[0]) is maximize


@every_optimizer
def test_is_deterministic(build):
    assert same(weights(trained(build, 12)[0]), weights(trained(build, 12)[0]))


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


# Parameters, in all their forms.


FORMS = {
    "list": lambda model: list(model.parameters()),
    "generator": lambda model: model.parameters(),
    "tuple": lambda model: tuple(model.parameters()),
    "named": lambda model: model.named_parameters(),
    "list of named": lambda model: list(model.named_parameters()),
    "one group": lambda model: [{"params": model.parameters()}],
    "groups": lambda model: [{"params": model[0].parameters()}, {"params": model[2].parameters()}],
    "named groups": lambda model: [{"params": model[i].named_parameters(str(i))} for i in (0, 2)],
    "a tensor a group": lambda model: [{"params": tensor} for tensor in model.parameters()],
}


@some_optimizers
@pytest.mark.parametrize("form", FORMS)
def test_parameters_come_in_any_form(build, form):
    expected = weights(trained(build, 7)[0])
    model = network()
    optimizer = build(FORMS[form](model))
    train(model, optimizer, range(7))
    assert same(weights(model), expected)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (lambda model: model[0].weight, TypeError, "an iterable of Tensors or dicts, but got"),
        (lambda model: [], ValueError, "empty parameter list"),
        (lambda model: iter(()), ValueError, "empty parameter list"),
        (lambda model: [{"params": []}], ValueError, "none of the parameters is trainable; call requires_grad_"),
        (lambda model: [model[0].weight, 1.0], TypeError, "can only optimize Tensors"),
        (lambda model: [{"params": set(model.parameters())}], TypeError, "ordered collections"),
        (lambda model: [model[0].weight * 2], ValueError, "non-leaf"),
        (lambda model: [model[0].weight.detach()], ValueError, "none of the parameters is trainable"),
        (lambda model: [{"params": model[0].parameters()}] * 2, ValueError, "more than one parameter group"),
        (lambda model: [("w", model[0].weight), model[0].bias], ValueError, "names are missing"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(params, error, words):
    with pytest.raises(error, match=words):
        mfac(params(network()))


@every_optimizer
def test_a_parameter_twice_in_a_group_warns_and_counts_once(build):
    model = network()
    first = model[0].weight
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = build([first, *model.parameters(), model[2].bias])
    train(model, optimizer, range(7))
    assert same(weights(model), weights(trained(build, 7)[0]))
    clone = copy.deepcopy(optimizer)
    clone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(clone.state_dict(), optimizer.state_dict())


def test_two_parameters_of_one_name_are_refused():
    first, second = network(), network()
    with pytest.raises(ValueError, match=r"two parameters are called '0.weight'; give them different names"):
        mfac([*first.named_parameters(), *second.named_parameters()])
    optimizer = mfac(first.named_parameters())
    with pytest.raises(ValueError, match=r"two parameters are called '0.weight'"):
        optimizer.add_param_group({"params": second.named_parameters()})
    assert len(optimizer.param_groups) == 1


@every_optimizer
def test_can_be_printed(build):
    text = repr(build([{"params": network().parameters(), "lr": 0.125}]))
    assert text.startswith("MFAC (")
    assert "lr: 0.125" in text


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
@pytest.mark.parametrize("steps", [0, 3])
def test_without_any_gradient_a_step_changes_nothing(build, steps):
    model, optimizer = trained(build, steps)
    optimizer.zero_grad()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.step()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)


@every_optimizer
@pytest.mark.parametrize("steps", [0, 6])
def test_a_parameter_without_a_gradient_does_not_move_and_is_not_frozen(build, steps):
    model, optimizer = trained(build, steps)
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
def test_zero_grad_both_ways(build):
    model, optimizer = trained(build, 1)
    grads = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert not any(grad.any() for grad in grads)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


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


@every_optimizer
def test_accumulated_and_clipped_gradients_enter_as_they_are(build):
    def run(clip_by_hand):
        model = network()
        optimizer = build(model.parameters())
        for step in range(6):
            optimizer.zero_grad()
            for part in (step, 100 + step):
                (loss_of(model, part) / 2).backward()
            norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            if clip_by_hand:
                for parameter in model.parameters():
                    parameter.grad = parameter.grad * (0.1 / (norm + 1e-6)).clamp_max(1.0)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return weights(model)

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


# Parameters that are frozen, added, of other kinds.


@every_optimizer
def test_a_frozen_parameter_moves_once_it_is_thawed(build):
    model = network()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = build([*list(model.parameters())[2:], *model[0].parameters()])
    before = weights(model)
    train(model, optimizer, range(6))
    assert moved(before, model) == [False, False, True, False]
    model.requires_grad_(True)
    train(model, optimizer, range(6, 9))
    assert all(moved(before, model))


def test_a_thawed_parameter_is_as_if_its_gradients_had_been_zero():
    models = [network().double(), network().double()]
    models[0][2].requires_grad_(False)
    optimizers = [MFAC(model.parameters(), **SETTINGS, momentum=0.9) for model in models]
    for step in range(12):
        if step == 7:
            models[0][2].requires_grad_(True)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step < 7 and model is models[1]:
                model[2].weight.grad = model[2].bias.grad = None
            optimizer.step()
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-10, atol=1e-12)


@without_decay
@pytest.mark.parametrize("when", [3, 8])
def test_a_group_added_in_mid_training_is_as_if_it_had_been_there(build, when):
    """With zero gradients until then."""
    late, early = network().double(), network().double()
    optimizers = [build(late[0].parameters()), build([{"params": m.parameters()} for m in (early[0], early[2])])]
    for step in range(12):
        if step == when:
            optimizers[0].add_param_group({"params": late[2].parameters()})
        for model, optimizer in zip((late, early), optimizers, strict=True):
            model.zero_grad(set_to_none=True)
            loss_of(model, step).backward()
            if step < when:
                for parameter in model[2].parameters():
                    parameter.grad.zero_()
            optimizer.step()
    torch.testing.assert_close(weights(late), weights(early), rtol=1e-9, atol=1e-12)


@every_optimizer
def test_a_group_added_has_its_own_options_and_the_optimizer_s_for_the_rest(build):
    model = network()
    optimizer = build(model[0].parameters(), lr=0.125)
    optimizer.add_param_group({"params": model[2].weight, "momentum": 0.25})
    optimizer.add_param_group({"params": [model[2].bias], "lr": 0.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125, 0.0]
    assert optimizer.param_groups[1]["momentum"] == 0.25
    before = weights(model)
    train(model, optimizer, range(4))
    assert moved(before, model) == [True, True, True, False]


def test_a_group_that_is_refused_is_not_added():
    model, optimizer = trained(mfac, 4)
    extra = nn.Linear(2, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for options, words in [
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"damping": 1.0}, "damping: one for the whole window; pass it to MFAC, not to a group"),
        ({"num_grads": 7, "window": torch.bfloat16}, "num_grads, window: one for the whole window"),
    ]:
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": extra.parameters(), **options})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model[0].parameters()})
    with pytest.raises(ValueError, match=r"is torch.complex64; only real floating-point parameters"):
        optimizer.add_param_group({"params": torch.zeros(2, dtype=torch.complex64, requires_grad=True)})
    assert same(optimizer.state_dict(), state)
    train(model, optimizer, range(4, 6))


@every_optimizer
def test_parameters_that_are_not_contiguous(build):
    def run(arrange):
        model = network()
        for layer in (model[0], model[2]):
            for name in ("weight", "bias"):
                setattr(layer, name, nn.Parameter(arrange(getattr(layer, name).detach())))
        optimizer = build(model.parameters())
        train(model, optimizer, range(8))
        return weights(model)

    def strided(tensor):
        return torch.stack((tensor, tensor), -1)[..., 0]

    assert not strided(torch.ones(2, 3)).is_contiguous()
    for arranged, plain in zip(run(strided), run(torch.clone), strict=True):
        torch.testing.assert_close(arranged, plain)


@every_optimizer
def test_channels_last_and_scalar_parameters(build):
    def run(memory_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
        model = model.to(memory_format=memory_format)
        optimizer = build(model.parameters())
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            optimizer.zero_grad()
            (model.scale * model(torch.randn(6, 3, 6, 6, generator=generator))).square().mean().backward()
            optimizer.step()
        assert model[0].weight.is_contiguous(memory_format=memory_format)
        return weights(model)

    torch.testing.assert_close(run(torch.channels_last), run(torch.contiguous_format))


@every_optimizer
def test_dtypes_may_differ(build):
    model = network()
    model[0].weight = nn.Parameter(model[0].weight.detach().double())
    model[2].bias = nn.Parameter(model[2].bias.detach().bfloat16())
    optimizer = build(model.parameters())
    dtypes = [tensor.dtype for tensor in model.parameters()]
    before = weights(model)

    def loss():
        x = torch.tanh(torch.randn(16, 5).double() @ model[0].weight.T + model[0].bias).float()
        return (x @ model[2].weight.T + model[2].bias.float()).square().mean()

    first = loss().item()
    for _ in range(15):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < first
    assert all(moved(before, model))
    assert [tensor.dtype for tensor in model.parameters()] == dtypes


@some_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_dtype(build, dtype):
    model = network().to(dtype)
    optimizer = build(model.parameters())
    losses = train(model, optimizer, [0] * 20)
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}


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


# Mixed precision, compiled models.


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


def test_a_gradient_scaler_takes_the_steps_of_a_run_without_it():
    model, _ = trained(mfac, 8)
    scaled = network()
    optimizer = mfac(scaled.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(weights(scaled), weights(model))  # a power of two scales without rounding


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_the_plain_one(backend):
    plain, _ = trained(mfac, 7)
    model = network()
    compiled = torch.compile(model, backend=backend)
    optimizer = mfac(compiled.named_parameters())
    train(compiled, optimizer, range(7))
    torch.testing.assert_close(weights(model), weights(plain))


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

"""Parameters in all their forms: listed, named, grouped, frozen, added later, of any layout and dtype."""

import copy

import pytest
import torch
from optimizers import (
    SETTINGS,
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
    without_decay,
)
from torch import nn

from mfac import MFAC

# Parameters, in all their forms.


FORMS = {
    "generator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
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
        (lambda model: [{"params": []}], ValueError, "none of the parameters is trainable; call requires_grad_"),
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
        ({"damping": 1.0}, "damping: one for all groups; pass it to the optimizer, not a group"),
        ({"num_grads": 7, "window": torch.bfloat16}, "num_grads, window: one for all groups"),
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

"""Parameters in all forms: listed, named, grouped, frozen, added later, pruned, of any layout and dtype."""

import copy

import pytest
import torch
from optimizers import every_optimizer, loss_of, masked, mfac, network, some_optimizers, train, trained, with_past_zeros
from states import moved, same, unchanged, weights
from torch import nn

from mfac import MFACPreconditioner, TopK

FORMS = {
    "generator": lambda model: model.parameters(),
    "groups": lambda model: [{"params": model[0].parameters()}, {"params": model[2].parameters()}],
    "named groups": lambda model: [{"params": model[i].named_parameters(str(i))} for i in (0, 2)],
    "one tensor per group": lambda model: [{"params": tensor} for tensor in model.parameters()],
}


@some_optimizers
@pytest.mark.parametrize("form", FORMS)
def test_parameters_come_in_any_form(build, form):
    model = network()
    train(model, build(FORMS[form](model)), range(7))
    assert same(weights(model), weights(trained(build, 7)[0]))


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        (lambda model: model[0].weight, TypeError, "an iterable of Tensors or dicts, but got"),
        (lambda model: [], ValueError, "empty parameter list"),
        (lambda model: model.requires_grad_(False).parameters(), ValueError, "none of the parameters is trainable"),
        (lambda model: [("w", torch.zeros(3, dtype=torch.complex64, requires_grad=True))], ValueError,
         "w is torch.complex64; only real floating-point parameters can be trained"),
        (lambda model: [*model.named_parameters(), *network().named_parameters()], ValueError,
         "two parameters are called '0.weight'; give them different names"),
    ],
)  # fmt: skip
def test_parameters_that_are_refused(params, error, words):
    for build in (mfac, MFACPreconditioner):
        with pytest.raises(error, match=words):
            build(params(network()))


@every_optimizer
def test_a_parameter_twice_in_a_group_warns_and_counts_once(build):
    model = network()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = build([model[0].weight, *model.parameters(), model[2].bias])
    train(model, optimizer, range(7))
    assert same(weights(model), weights(trained(build, 7)[0]))
    clone = copy.deepcopy(optimizer)
    clone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(clone.state_dict(), optimizer.state_dict())


@with_past_zeros
@pytest.mark.parametrize("when", [3, 8])
@pytest.mark.parametrize("how", ["added", "thawed"])
def test_parameters_that_come_in_mid_training_are_as_if_their_gradients_had_been_zero(build, when, how):
    late, early = network().double(), network().double()
    late[2].requires_grad_(how == "added")
    first = late[0] if how == "added" else late
    optimizers = [build(first.parameters()), build([{"params": m.parameters()} for m in (early[0], early[2])])]
    for step in range(12):
        if step == when and how == "added":
            optimizers[0].add_param_group({"params": late[2].parameters()})
        late[2].requires_grad_(how == "added" or step >= when)
        for model, optimizer in zip((late, early), optimizers, strict=True):
            model.zero_grad(set_to_none=True)
            loss_of(model, step).backward()
            for parameter in model[2].parameters() if step < when else ():
                parameter.grad = torch.zeros_like(parameter) if how == "added" else None
            optimizer.step()
    torch.testing.assert_close(weights(late), weights(early), rtol=1e-10, atol=1e-12)


def test_an_added_group_has_its_own_options_and_a_refused_one_is_not_added(monkeypatch):
    model = network()
    optimizer = mfac(model[0].named_parameters(), lr=0.125)
    optimizer.add_param_group({"params": [("w", model[2].weight)], "momentum": 0.25, "lr": 0.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.0]
    before = weights(model)
    train(model, optimizer, range(4))
    assert moved(before, model) == [True, True, False, False]
    extra = [("b", model[2].bias)]
    for params, options, words in [
        (extra, {"lr": -1.0}, "lr must be 0 or more"),
        (extra, {"damping": 1.0}, "damping: one for all groups; pass it to the optimizer, not a group"),
        (extra, {"num_grads": 7, "window": torch.bfloat16}, "num_grads, window: one for all groups"),
        ([("w", model[2].bias)], {}, "two parameters are called 'w'"),
        (model[0].named_parameters(), {}, "more than one parameter group"),
    ]:
        with unchanged(optimizer), pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": params, **options})
    operator, widen = optimizer._window.operator, optimizer._window.operator.widen
    monkeypatch.setattr(operator, "widen", lambda extra: [widen(extra), 1 / 0])  # interrupted after it
    with pytest.raises(ZeroDivisionError):
        optimizer.add_param_group({"params": extra})
    monkeypatch.undo()
    optimizer.add_param_group({"params": extra})
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


@some_optimizers
def test_dtypes_may_differ(build):
    model = network()
    model[0].weight = nn.Parameter(model[0].weight.detach().double())
    model[2].bias = nn.Parameter(model[2].bias.detach().bfloat16())
    optimizer = build(model.parameters())
    dtypes = [tensor.dtype for tensor in model.parameters()]

    def loss():
        x = torch.tanh(torch.randn(16, 5).double() @ model[0].weight.T + model[0].bias).float()
        return (x @ model[2].weight.T + model[2].bias.float()).square().mean()

    first = loss().item()
    for _ in range(15):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < first
    assert [tensor.dtype for tensor in model.parameters()] == dtypes


@some_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype(build, dtype):
    for model in (network().to(dtype), network()):
        optimizer = build(model.parameters())
        losses = train(model.to(dtype), optimizer, [0] * 20)
        assert losses[-1] < losses[0]
        assert {tensor.dtype for tensor in model.parameters()} == {dtype}


MASK = torch.arange(35).view(7, 5) % 3 > 0


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"0.wieght": MASK}, "'0.wieght' matches no parameter of the optimizer; did you mean '0.weight'"),
        ({"0.weight": [True, False]}, r"'0.weight' needs a bool tensor .* this one is a list"),
        (MASK, r"masks must be \{parameter or name: bool tensor\}, not Tensor"),
        ({"0.weight": MASK}, r"0.weight has 12 weights that are not zero where its mask"),
        ({n: torch.zeros_like(p, dtype=torch.bool) for n, p in network().named_parameters()}, "masks keep no"),
    ],
    ids=range(5),
)  # fmt: skip
def test_wrong_masks(masks, words):
    with pytest.raises(ValueError, match=words):
        mfac(network().named_parameters(), masks=masks)
    with pytest.raises(ValueError, match=r"'0.weight' matches no .* optimizer \(give it model.named_parameters"):
        mfac(network().parameters(), masks={"0.weight": MASK})


def test_a_mask_is_copied_and_one_of_a_frozen_parameter_counts_once_it_is_thawed():
    model, mask = network(), MASK.clone()
    model[0].weight.data.mul_(mask)
    model[0].weight.requires_grad_(False)
    optimizer = mfac(model.named_parameters(), masks={"0.weight": mask})
    mask.fill_(True)
    train(model, optimizer, range(3))
    model[0].weight.requires_grad_(True)
    before = weights(model)
    train(model, optimizer, range(3, 6))
    assert not model[0].weight[~MASK].any()
    assert (model[0].weight != before[0])[MASK].all()
    assert torch.equal(optimizer.state_dict()["state"][0]["mask"], MASK)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "weight_decay": 0.1, "max_step_norm": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "window": TopK(0.4, block=8), "update_every": 2},
    ],
)
def test_pruned_weights_stay_exactly_zero(options):
    model = network()
    model[2].bias.data.zero_()
    masks = {model[0].weight: MASK, model[2].bias: torch.zeros(3, dtype=torch.bool)}  # one of them altogether
    optimizer = masked(model.parameters(), masks=masks, **options)
    before = weights(model)
    train(model, optimizer, range(12))
    assert not model[0].weight[~MASK].any()
    assert not model[2].bias.any()
    assert (model[0].weight[MASK] != before[0][MASK]).all()

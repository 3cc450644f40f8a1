import pytest
import torch
from models import CASES, mlp
from torch import nn

from mfac.layout import ParameterLayout


def test_default_is_every_trainable_parameter_in_order_and_once():
    model = CASES["frozen_backbone"]().model
    layout = ParameterLayout(model)
    assert layout.names == ("7.weight", "7.bias")
    assert layout.sizes == (72, 3)
    assert layout.dim == layout.full_dim == 75
    model = CASES["tied"]().model  # once, by either name
    assert "head.weight" not in ParameterLayout(model).names
    assert ParameterLayout(model, "head.weight").names == ("embed.weight",)


@pytest.mark.parametrize("params", ["2.weight", ["re:^2.*weight"], "re:2.w", ("2.weight", "re:2.weight")])
def test_names_patterns_and_tensors(params):
    assert ParameterLayout(mlp().model, params).names == ("2.weight",)
    model = mlp().model  # tensors come in its order
    assert ParameterLayout(model, [model[2].bias, model[0].weight]).names == ("0.weight", "2.bias")
    assert ParameterLayout(model, model.parameters()).dim == 66


@pytest.mark.parametrize(
    ("params", "names"),
    [("0.bias", ["0.bias"]), ("re:^0.b", ["0.bias"]), ("re:bias", ["2.bias"]), (["0.bias", "2.bias"],) * 2],
)
def test_frozen_parameters_are_chosen_only_if_nothing_else_has_that_name(params, names):
    model = mlp().model
    model[0].bias.requires_grad_(False)
    assert list(ParameterLayout(model, params).names) == names
    assert "0.bias" not in ParameterLayout(model).names


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("0.wieght", "'0.wieght' matches no parameter of the model; did you mean '0.weight'"),
        ("re:conv", "the pattern 're:conv' matches no parameter of the model; it has 0.weight, 0.bias"),
        (torch.zeros(2), r"a tensor of shape \(2,\) matches no parameter"),
        ("2.steps", "'2.steps' is not of floating-point numbers, so it has no gradient"),
        ([], "params is empty; name at least one"),
        ("re:[", r"params: 're:\[' is not a regular expression after 're:': unterminated"),
    ],
)
def test_parameters_that_are_not_there(params, message):
    model = mlp().model
    model[2].steps = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
    with pytest.raises(ValueError, match=message):
        ParameterLayout(model, params)
    with pytest.raises(ValueError, match="no trainable parameter; call requires_grad_"):
        ParameterLayout(nn.ReLU())
    with pytest.raises(ValueError, match="all parameters are empty; at least one is needed"):
        ParameterLayout.of_tensors({"w": torch.zeros(0, 3)})


def test_flatten_and_unflatten_are_inverse():
    model = mlp().model
    layout = ParameterLayout(model)
    row = torch.empty(layout.dim)
    layout.flatten(list(model.parameters()), row)
    for name, value in layout.unflatten(row).items():
        assert torch.equal(value, model.get_parameter(name))
    half = torch.empty(66, dtype=torch.bfloat16)
    layout.flatten(list(model.parameters()), half)
    assert torch.equal(half, row.bfloat16())
    with pytest.raises(ValueError, match=r"shape \(66,\), this one has \(3,\)"):
        layout.unflatten(torch.zeros(3))


def test_masks_keep_only_the_chosen_coordinates():
    model = mlp().model
    keep = torch.rand(3, 7) > 0.5
    layout = ParameterLayout(model, ["0.bias", "2.weight"], {"2.weight": keep, "0.weight": torch.zeros(7, 5).bool()})
    assert layout.dim == 7 + keep.sum()
    row, rows = torch.empty(layout.dim), torch.empty(2, layout.dim)
    layout.flatten([None, model[2].weight], row)
    assert torch.equal(row, torch.cat([torch.zeros(7), model[2].weight[keep]]))
    layout.compress(torch.cat([torch.zeros(7), model[2].weight.flatten()]).expand(2, -1), rows)
    assert torch.equal(rows, row.expand(2, -1))
    assert torch.equal(layout.unflatten(row)["2.weight"], model[2].weight * keep)
    everything = ParameterLayout(model, masks={model[0].weight: torch.ones(7, 5, dtype=torch.bool)})  # by parameter
    assert (everything.masked, everything.dim) == (False, 66)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"nothing": torch.ones(1).bool()}, "'nothing' matches no parameter of the model; it has 0.weight"),
        ({torch.zeros(3): torch.ones(3).bool()}, r"a tensor of shape \(3,\) matches no parameter"),
        ({"0.bias": torch.rand(7)}, "'0.bias' has other values than True or 1 for kept and False or 0 for removed"),
        ({"0.bias": torch.ones(7).to_sparse()}, "needs a bool tensor .* sparse or on the meta device"),
        ({"0.bias": torch.ones(6).bool()}, r"this one is torch.bool of shape \(6,\)"),
        ({"0.bias": torch.zeros(7).bool()}, "the masks keep no coordinate at all"),
    ],
)
def test_masks_that_do_not_fit(masks, message):
    with pytest.raises(ValueError, match=message):
        ParameterLayout(mlp().model, "0.bias", masks)

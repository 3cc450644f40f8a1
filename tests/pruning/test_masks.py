"""Masks in and out: dict, safetensors, torch.nn.utils.prune, torch.ao.pruning, zeros; the table of sparsities."""

import copy

import pytest
import torch
from models import CASES, cross_entropy, mlp
from pruning_cases import some_masks
from safetensors.torch import load_file, save_file
from states import same, unchanged
from torch import nn
from torch.ao.pruning import FakeSparsity, WeightNormSparsifier
from torch.nn.utils import prune

import mfac
from mfac.pruning import sparsity_report
from mfac.pruning.masks import apply_masks, load_masks, masks_from_zeros, save_masks, to_torch_ao, to_torch_prune


def test_saved_and_loaded_and_as_a_dict_of_zeros_and_ones_with_the_names_of_a_wrapped_model(tmp_path):
    masks = some_masks(CASES["resnet"]().model)
    save_masks(masks, tmp_path / "masks.safetensors")
    assert same(load_masks(tmp_path / "masks.safetensors"), masks)
    assert {t.dtype for t in load_file(tmp_path / "masks.safetensors").values()} == {torch.bool}
    assert same(load_masks({f"module.{name}": mask.to(torch.uint8) for name, mask in masks.items()}), masks)
    first = next(iter(masks))
    load_masks(masks)[first].zero_()  # a copy
    assert masks[first].any()


def test_from_torch_prune_model_and_its_state_dict():
    model = mlp().model
    prune.l1_unstructured(model[0], "weight", 0.4)
    prune.random_unstructured(model[2], "bias", 1)
    model.register_buffer("causal_mask", torch.ones(3, 3))  # an attention mask is none
    expected = {"0.weight": model[0].weight_mask.bool(), "2.bias": model[2].bias_mask.bool()}
    assert same(load_masks(model), expected)
    assert same(load_masks(model.state_dict()), expected)


def test_from_torch_ao():
    model = mlp().model
    sparsifier = WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1), zeros_per_block=1)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    masks = load_masks(model)
    assert list(masks) == ["0.weight"]
    assert torch.equal(masks["0.weight"], model[0].parametrizations.weight[0].mask.bool())
    assert 0 < masks["0.weight"].sum() < 35


@pytest.mark.parametrize("act", [to_torch_prune, to_torch_ao])
def test_to_torch_and_back_and_tightened(act):
    model = mlp().model
    plain, masks = copy.deepcopy(model), some_masks(model)
    act(model, masks)
    assert same(load_masks(model), masks)
    apply_masks(plain, masks)
    x = torch.randn(3, 5)
    assert torch.equal(model(x), plain(x))
    tighter = {name: mask & (torch.rand(mask.shape) > 0.5) for name, mask in masks.items()}
    second = tighter if act is to_torch_ao else some_masks(plain, 2)
    act(model, second)
    assert same(load_masks(model), {name: masks[name] & second[name] for name in masks})
    assert act is to_torch_prune or [type(one) for one in model[0].parametrizations.weight] == [FakeSparsity]


@pytest.mark.parametrize("names", [["0.weight"], ["1.weight"], ["0.weight", "1.weight"]])
@pytest.mark.parametrize("act", [apply_masks, to_torch_prune, to_torch_ao])
def test_a_tied_weight_is_masked_by_any_of_its_names_wherever_it_is_used(act, names):
    model, mask = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.eye(3).bool()
    model[1].weight = model[0].weight
    with unchanged(model), pytest.raises(ValueError, match=r"'1.weight' is another name of a weight whose mask"):
        act(model, {"0.weight": mask, "1.weight": ~mask})
    act(model, dict.fromkeys(names, mask))
    for layer in model:
        assert torch.equal(layer.weight != 0, mask)
    assert len({id(p) for p in model.parameters() if p.ndim == 2}) == 1
    assert act is apply_masks or load_masks(model).keys() == {"0.weight", "1.weight"}


def test_masks_from_zeros_leaves_biases_alone():
    model = mlp().model
    apply_masks(model, masks := some_masks(model))
    nn.init.zeros_(model[0].bias)
    assert same(masks_from_zeros(model), masks)


def test_nothing_to_load_or_save(tmp_path):
    with pytest.raises(ValueError, match="the dict holds no mask"):
        load_masks({})
    with pytest.raises(ValueError, match=r"the model has no masks of .* mfac.masks_from_zeros\(model\)"):
        load_masks(mlp().model)
    with pytest.raises(ValueError, match=r"the folder .* does not exist; create it first"):
        save_masks(some_masks(mlp().model), tmp_path / "nowhere" / "masks.safetensors")
    with pytest.raises(ValueError, match="there are no masks to save"):
        save_masks({}, tmp_path / "masks.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_or_torn_or_of_weights(tmp_path):
    path = tmp_path / "masks.safetensors"
    with pytest.raises(ValueError, match=r"does not exist; it must be a safetensors file, such as mfac.save_masks"):
        load_masks(path)
    save_masks(some_masks(mlp().model), path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"not a complete safetensors file .*write it with mfac.save_masks"):
        load_masks(path)
    save_file(dict(mlp().model.state_dict()), path)
    with pytest.raises(ValueError, match="True or 1 for kept"):
        load_masks(path)


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "masks.safetensors"
    masks = some_masks(mlp().model)
    save_masks(masks, path)

    def torn(tensors, draft, metadata):
        draft.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", torn)
    with pytest.raises(OSError, match="disk full"):
        save_masks(some_masks(mlp().model, 3), path)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert same(load_masks(path), masks)


@pytest.mark.parametrize("act", [apply_masks, to_torch_prune, to_torch_ao])
def test_one_mask_that_does_not_fit_and_nothing_is_changed(act):
    model = mlp().model
    masks = some_masks(model)
    for given, message in (
        (masks | {"2.wait": masks["2.weight"]}, r"'2.wait' matches no parameter of the model; did you mean"),
        (masks | {"2.weight": masks["0.weight"]}, r"'2.weight' needs a bool tensor of shape \(3, 7\)"),
        ({}, "masks is empty"),
    ):
        with unchanged(model), pytest.raises(ValueError, match=message):
            act(model, given)


def trained_with(model, masks):
    apply_masks(model, masks)
    for optimizer in (
        mfac.MFAC(model.named_parameters(), 0.1, 3, masks=masks),
        mfac.FullMatrixAdam(model.named_parameters(), num_grads=3, masks=masks),
    ):
        cross_entropy(model, *BATCHES).backward()
        optimizer.step()
    mfac.MFACPreconditioner(model.named_parameters(), 3, masks=masks).step()
    return [parameter.grad for parameter in model.parameters()]


BATCHES = [mlp().batch]
TAKERS = {
    **{act.__name__: lambda model, masks, _, act=act: act(model, masks) for act in (apply_masks, to_torch_prune)},
    "to_torch_ao": lambda model, masks, path: to_torch_ao(model, masks),
    "save_masks": lambda model, masks, path: [save_masks(masks, path), load_masks(path)],
    "save_compact": lambda model, masks, path: [apply_masks(model, masks), mfac.save_compact(model, path, masks)],
    "sparsity_report": lambda model, masks, path: str(mfac.sparsity_report(model, masks)),
    "attach_masks": lambda model, masks, _: bool(mfac.attach_masks(torch.optim.SGD(model.parameters()), masks, model)),
    "optimizers": lambda model, masks, path: trained_with(model, masks),
    "collect_gradients": lambda model, masks, _: mfac.collect_gradients(model, cross_entropy, BATCHES, 1, masks=masks),
    "prune": lambda model, masks, _: mfac.prune(model, cross_entropy, BATCHES, 0.9, masks=masks, num_grads=1).masks,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_zeros_and_ones_are_taken_everywhere(taker, tmp_path):
    found = []
    for dtype in (torch.bool, torch.float32, torch.uint8):
        model = mlp().model
        masks = {name: mask.to(dtype) for name, mask in some_masks(model).items()}
        found.append([TAKERS[taker](model, masks, tmp_path / "file.safetensors"), dict(model.state_dict())])
    assert same(found[0], found[1])
    assert same(found[0], found[2])


HALF = torch.arange(35).view(7, 5) % 2 == 1


@pytest.mark.parametrize("act", [apply_masks, to_torch_prune, to_torch_ao])
def test_the_table_of_sparsities_also_of_models_prepared_by_torch_s_tools(act):
    model = mlp().model
    act(model, {"0.weight": HALF})
    report = sparsity_report(model)
    assert (report.weights, report.removed, report.others, report.sparsity) == (56, 18, 10, 18 / 56)
    counts = [(row.name, row.sparsity, row.removed, row.astray) for row in report.rows]
    assert counts == [("0.weight", 18 / 35, 18, 0), ("2.weight", 0, 0, 0)]
    assert str(report).splitlines() == [
        "layer             shape  weights  removed  sparsity",
        "0.weight          7 x 5       35       18   51.43 %",
        "2.weight          3 x 7       21        0    0.00 %",
        "total                         56       18   32.14 %",
        "other parameters              10",
    ]


def test_masks_count_what_went_astray_shows_and_masks_that_do_not_fit_are_refused():
    model = mlp().model
    masks = {"0.weight": HALF, "2.bias": torch.tensor([True, False, True])}
    apply_masks(model, masks)
    model[0].weight.data[0, 0] = 1.0
    model[0].weight.data[0, 1] = 0.0  # kept, though it is zero
    report = sparsity_report(model, masks)
    counts = [(row.name, row.removed, row.astray) for row in report.rows]
    assert counts == [("0.weight", 18, 1), ("2.bias", 1, 0)]
    assert report.others == 7 + 21
    assert "1 not zero" in str(report)
    with pytest.raises(ValueError, match=r"'2.weight' needs a bool tensor of shape \(3, 7\)"):
        sparsity_report(model, {"2.weight": HALF})

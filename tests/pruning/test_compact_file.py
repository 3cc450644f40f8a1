"""The compact file: the same bits back, as small as the arithmetic says, and never half written."""

import pytest
import torch
from models import CASES, mlp
from safetensors.torch import save_file
from states import unchanged

from experiments.models.resnet import ResNet
from mfac.pruning.compact_file import load_compact, save_compact
from mfac.pruning.masks import apply_masks


def pruned(model, sparsity=0.9, seed=0):
    torch.manual_seed(seed)
    masks = {name: torch.rand(p.shape) > sparsity for name, p in model.named_parameters() if p.ndim > 1}
    apply_masks(model, masks)
    return masks


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(bits(left[name]), bits(right[name])) for name in left
    )


@pytest.mark.parametrize("with_masks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["mlp", "resnet", "tied"])
def test_the_same_bits_come_back(tmp_path, case, dtype, with_masks):
    model = CASES[case]().model.to(dtype)
    masks = pruned(model)
    model.get_parameter(next(iter(masks))).data.flatten()[3] = -0.0
    masks[next(iter(masks))].flatten()[3] = True
    save_compact(model, tmp_path / "model.safetensors", masks if with_masks else None)
    other = CASES[case]().model.to(dtype)
    loaded = load_compact(tmp_path / "model.safetensors", other)
    assert same(loaded.state_dict, dict(model.state_dict()))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert all(torch.equal(loaded.masks[name], mask) for name, mask in masks.items() if name in loaded.masks)
    assert loaded.masks


def test_a_mask_by_the_second_name_of_a_tied_weight_and_one_where_a_kept_weight_is_zero(tmp_path):
    model = CASES["tied"]().model
    mask = next(iter(pruned(model).values()))
    save_compact(model, tmp_path / "model.safetensors", {"head.weight": mask})
    assert same(load_compact(tmp_path / "model.safetensors").masks, {"embed.weight": mask})
    model = mlp().model
    masks = pruned(model, 0.5)
    model[0].weight.data.zero_()
    save_compact(model, tmp_path / "model.safetensors", masks)
    assert same(load_compact(tmp_path / "model.safetensors").masks, masks)


def test_the_size_is_what_the_arithmetic_says(tmp_path):
    model = ResNet(20)
    masks = pruned(model, 0.95)
    size = save_compact(model, tmp_path / "model.safetensors")  # dense tensors are not packed
    state = model.state_dict()
    expected = sum(4 * int(m.sum()) + (m.numel() + 7) // 8 for m in masks.values())
    expected += sum(v.numel() * v.element_size() for name, v in state.items() if name not in masks)
    assert size.dense == sum(v.numel() * v.element_size() for v in state.values())
    assert size.compact == (tmp_path / "model.safetensors").stat().st_size
    assert expected < size.compact < expected + 150 * len(state)  # names and offsets
    assert size.ratio > 5
    assert str(size).endswith(f"{size.dense:,}: {size.ratio:.2f} times smaller")


def test_masks_that_would_lose_weights(tmp_path):
    model = mlp().model
    mask = torch.zeros(7, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"'0.weight' removes 35 weights that are not zero.*mfac.apply_masks"):
        save_compact(model, tmp_path / "model.safetensors", {"0.weight": mask})
    with pytest.raises(ValueError, match=r"'0.wait' matches no parameter of the state"):
        save_compact(model, tmp_path / "model.safetensors", {"0.wait": mask})
    with pytest.raises(ValueError, match="'epoch' is a int; a compact file holds tensors only"):
        save_compact({"epoch": 3}, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_there_torn_others_or_of_another_model(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"does not exist; it must be .* such as mfac.save_compact writes"):
        load_compact(path)
    tensors = {"w::values": torch.ones(3), "w::bits": torch.tensor([0b11110000], dtype=torch.uint8)}
    save_file(tensors, path, metadata={"format": "mfac-compact-1", "shapes": '{"w": [2, 4]}', "aliases": "{}"})
    with pytest.raises(ValueError, match="'w' has 3 values for 4 kept weights"):
        load_compact(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"not a file of save_compact; .*safetensors.torch.load_file"):
        load_compact(path)
    model, other = mlp().model, CASES["cnn"]().model
    pruned(model)
    save_compact(model, path)
    with unchanged(other), pytest.raises(ValueError, match=r"does not fit the model: \d+ tensors are missing"):
        load_compact(path, other)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_compact(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"shapes": "{", "aliases": "{}"},
        {"shapes": '{"w": [2, 4]}', "aliases": '{"tied": "lost"}'},
        {"shapes": '{"w": [-2, 4]}', "aliases": "{}"},
    ],
    ids=str,
)
def test_damaged_metadata_is_named(tmp_path, metadata):
    tensors = {"w::values": torch.ones(4), "w::bits": torch.tensor([0b11110000], dtype=torch.uint8)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "mfac-compact-1", **metadata})
    with pytest.raises(ValueError, match=r"m.safetensors is damaged|m.safetensors: 'w' has"):
        load_compact(tmp_path / "m.safetensors")

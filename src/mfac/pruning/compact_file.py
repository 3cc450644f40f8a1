"""A sparse model on disk: the kept values and one bit per weight, in a safetensors file."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mfac.layout import by_plain_name, match_masks, plain_name
from mfac.saved import read_tensors, reading, write_tensors

FORMAT = "mfac-compact-1"
VALUES, BITS = "::values", "::bits"  # a packed tensor is stored as name::values and name::bits, eight weights per byte
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CompactSize:
    """The bytes of a compact file, and of the same tensors stored densely."""

    compact: int
    dense: int

    @property
    def ratio(self) -> float:
        return self.dense / self.compact

    def __str__(self) -> str:
        return f"{self.compact:,} bytes instead of {self.dense:,}: {self.ratio:.2f} times smaller"


@dataclass(frozen=True)
class CompactModel:
    """The content of a compact file: the dense tensors by name, and the masks of the packed ones."""

    state_dict: dict[str, Tensor]
    masks: dict[str, Tensor]


def save_compact(
    model: nn.Module | Mapping[str, Tensor], path: str | os.PathLike[str], masks: Mapping[str, Tensor] | None = None
) -> CompactSize:
    """Writes a model's state without the removed weights, completely or not at all.

    A tensor with a mask, or one that gets smaller by it, is packed into values and bits; the others are stored as they
    are. All are read back bit for bit, but for the sign of removed zeros. Without masks, the nonzero weights of tensors
    of two or more dimensions are kept. `model` may be a state_dict.

    Raises:
        ValueError: a mask fits no tensor, or removes a weight that is not zero (which would be lost).
    """
    state, aliases = _distinct(model.state_dict() if isinstance(model, nn.Module) else model)
    chosen = _kept(state, aliases, masks)
    tensors, shapes = dict(state), {}
    for name, kept in chosen.items():
        values, bits = state[name][kept], torch.from_numpy(np.packbits(kept.flatten().numpy()))
        if masks is not None or values.nbytes + bits.nbytes < state[name].nbytes:
            shapes[name] = list(tensors.pop(name).shape)
            tensors |= {name + VALUES: values, name + BITS: bits}
    write_tensors(tensors, path, {"format": FORMAT, "shapes": json.dumps(shapes), "aliases": json.dumps(aliases)})
    return CompactSize(Path(path).stat().st_size, sum(tensor.nbytes for tensor in state.values()))


def load_compact(path: str | os.PathLike[str], model: nn.Module | None = None) -> CompactModel:
    """Reads a compact file into dense tensors, and into `model` if one is given.

    Raises:
        ValueError: the file is missing, incomplete or not a compact file, or does not fit the model.
    """
    tensors, description = read_tensors(path, "save_compact")
    if description.get("format") != FORMAT:
        raise ValueError(f"{path} is not a file of save_compact; read it with safetensors.torch.load_file")
    with reading(f"the content of {path}"):
        shapes, aliases = json.loads(description["shapes"]), json.loads(description["aliases"])
        state = {name: tensor for name, tensor in tensors.items() if not name.endswith((VALUES, BITS))}
        masks = {}
        for name, shape in shapes.items():
            state[name], masks[plain_name(name)] = _unpack(path, name, shape, tensors)
        state |= {name: state[original] for name, original in aliases.items()}
    if model is not None:
        _fill(model, state, path)
    return CompactModel(state, masks)


def _distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, on the CPU; and {name: first name} of the tied ones."""
    tensors, aliases = {}, {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} is a {type(value).__name__}; a compact file holds tensors only; leave it out")
        identity = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() and identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity] = name
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, aliases


def _kept(
    state: Mapping[str, Tensor], aliases: Mapping[str, str], masks: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    if masks is None:
        numbers = {name: tensor for name, tensor in state.items() if tensor.ndim >= 2 and tensor.is_floating_point()}
        return {name: t.view(RAW[t.element_size()]) != 0 for name, t in numbers.items()}  # by bits: -0.0 is kept
    names = {id(tensor): name for name, tensor in state.items()}
    known = by_plain_name({name: state[first] for name, first in aliases.items()} | dict(state))
    chosen = {}
    for key, tensor, mask in match_masks(masks, known, "the state"):
        kept = chosen[names[id(tensor)]] = mask.cpu()
        astray = int(torch.count_nonzero(tensor[~kept]))
        if astray:
            raise ValueError(f"masks: {key!r} removes {astray} weights that are not zero; use mfac.apply_masks first")
    return chosen


def _unpack(path: Any, name: str, shape: list[int], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    values, bits = tensors[name + VALUES], tensors[name + BITS]
    kept = torch.from_numpy(np.unpackbits(bits.numpy(), count=int(np.prod(shape))).astype(bool)).reshape(shape)
    if int(kept.sum()) != len(values):
        raise ValueError(f"{path}: {name!r} has {len(values)} values for {int(kept.sum())} kept weights; save it again")
    dense = values.new_zeros(shape)
    dense[kept] = values
    return dense, kept


def _fill(model: nn.Module, state: Mapping[str, Tensor], path: Any) -> None:
    own = model.state_dict()
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    missing, spare = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if wrong or missing or spare:
        raise ValueError(
            f"{path} does not fit the model: {len(missing)} tensors are missing {missing[:3]}, {len(spare)} are "
            f"unknown {spare[:3]}, {len(wrong)} have another shape {wrong[:3]}; build the model it was saved from"
        )
    model.load_state_dict(dict(state))

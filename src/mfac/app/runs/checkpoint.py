"""Weights from a file into a model: what torch.save or safetensors wrote, or a compact file."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.runs.tensor_files import INSTALL, first_names
from mfac.pruning.compact_file import FORMAT, load_compact

INNER = ("state_dict", "model_state_dict", "model")  # what training scripts call the weights inside a checkpoint
PREFIX = "module."  # of DataParallel


def load_checkpoint(path: Path, model: nn.Module) -> None:
    """Loads a state_dict into the model; all of it or nothing.

    Raises:
        ValueError: the file is not there, is no state_dict, or belongs to another model (which tensor differs).
        ImportError: it is a safetensors file, and safetensors is missing.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; it should be a state_dict, by torch.save or safetensors")
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    own = model.state_dict()
    for name, first in first_names(model).items():  # tied weights may be in the file under one of their names
        if name not in state and first in state:
            state[name] = state[first]
        elif first not in state and name in state:
            state[first] = state[name]
    _check(path, own, state)
    model.load_state_dict(state)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(INSTALL) from error
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") == FORMAT:
                return load_compact(path).state_dict
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error})") from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} holds more than tensors and plain values, which may run code when it is read; "
            "save model.state_dict() by torch.save and give that"
        ) from None
    except (RuntimeError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a whole file of torch.save ({reason})") from None
    for key in INNER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} is no state_dict (name: tensor) but a {type(found).__name__} of other things")
    return dict(found)


def _check(path: Path, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name not in state:
            raise ValueError(f"{path} does not fit the model: it has no {name!r} ({_some(state)})")
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{path} does not fit the model: {name!r} has the shape {list(state[name].shape)} in the file, "
                f"and {list(tensor.shape)} in the model"
            )
    spare = [name for name in state if name not in own]
    if spare:
        raise ValueError(f"{path} does not fit the model: the model has no {spare[0]!r} ({_some(own)})")


def _some(names: Mapping[str, Tensor]) -> str:
    shown = list(names)[:3]
    return f"it has {', '.join(shown)}{' ...' if len(names) > 3 else ''}" if shown else "it is empty"

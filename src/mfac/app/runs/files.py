"""Files of a run: written atomically, weights as safetensors, checkpoints read without running code."""

import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mfac.pruning.atomic_file import replacing
from mfac.pruning.compact_file import FORMAT, load_compact

INNER = ("state_dict", "model_state_dict", "model")  # names of the weights inside the checkpoints of training scripts
PREFIX = "module."  # of DataParallel


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A draft to write to, which replaces `path` at the end of the block.

    Raises:
        OSError: the file could not be written, for whatever reason; with the system's error number if it is known.
    """
    try:
        with replacing(path) as draft:
            yield draft
    except Exception as error:
        if not isinstance(error, OSError | RuntimeError | SafetensorError):
            raise
        number = _error_number(error)
        if number is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        raise OSError(number, os.strerror(number), str(path)) from error


def _error_number(error: BaseException | None) -> int | None:
    """Of the error itself, from its text (safetensors), or of its cause (torch)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if found := re.search(r"os error (\d+)", str(error)):
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Saves plain values and tensors."""
    with writing(path) as draft, open(draft, "wb") as file:
        torch.save(dict(state), file)


def load_state(path: Path) -> dict[str, Any] | None:
    """What `save_state` saved; None if there is no such file."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def save_weights(model: nn.Module, path: Path) -> None:
    """Saves a model's state as safetensors; tied tensors are stored once.

    Raises:
        OSError: the file cannot be written; the old one is left in place.
    """
    names = _first_names(model)
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and names[name] == name
    }
    with writing(path) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})


def load_checkpoint(path: Path, model: nn.Module) -> None:
    """Loads a state_dict (torch.save, safetensors or a compact file) into the model; all of it or nothing.

    Raises:
        ValueError: there is no such file, it holds no state_dict, or it does not fit the model.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; expected a state_dict saved by torch.save or safetensors")
    state = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    for name, first in _first_names(model).items():  # tied weights may be stored under any one of their names
        if name not in state and first in state:
            state[name] = state[first]
        elif first not in state and name in state:
            state[first] = state[name]
    _check_fit(path, model.state_dict(), state)
    model.load_state_dict(state)


def _first_names(model: nn.Module) -> dict[str, str]:
    """{name in the state: first name of the same tensor}."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") == FORMAT:
                return load_compact(path).state_dict
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error})") from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} contains more than tensors and plain values, and loading it could run code; "
            "save model.state_dict() with torch.save instead"
        ) from None
    except (RuntimeError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a complete file of torch.save ({reason})") from None
    for key in INNER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds a {type(found).__name__} and not a state_dict (name: tensor)")
    return dict(found)


def _check_fit(path: Path, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    problem = None
    for name in {**own, **state}:
        if name not in state:
            problem = f"the file has no {name!r} ({_some(state)})"
        elif name not in own:
            problem = f"the model has no {name!r} ({_some(own)})"
        elif state[name].shape != own[name].shape:
            problem = f"{name!r} has shape {list(state[name].shape)} in the file and {list(own[name].shape)} in the model"
        if problem:
            raise ValueError(f"{path} does not fit the model: {problem}")


def _some(names: Mapping[str, Tensor]) -> str:
    return f"it has {', '.join(list(names)[:3])}{' ...' if len(names) > 3 else ''}" if names else "it is empty"

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
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from mfac.pruning.atomic_file import replacing
from mfac.pruning.compact_file import FORMAT, load_compact

INNER = ("state_dict", "model_state_dict", "model")  # names of the weights inside the checkpoints of training scripts


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A draft to write to, which replaces `path` at the end of the block.

    Raises:
        OSError: the file could not be written; with the system's error number if it is known.
    """
    try:
        with replacing(path) as draft:
            yield draft
    except (OSError, RuntimeError, SafetensorError) as error:
        cause: BaseException | None = error
        while cause is not None:
            in_text = re.search(r"os error (\d+)", str(cause))  # as safetensors reports it
            number = cause.errno if isinstance(cause, OSError) else int(in_text[1]) if in_text else None
            if number is not None:
                raise OSError(number, os.strerror(number), str(path)) from error
            cause = cause.__cause__ or cause.__context__
        raise OSError(f"{path} cannot be written: {error}") from error


def save_weights(model: nn.Module, path: Path) -> None:
    """Saves a model's state as safetensors; tied tensors are stored once."""
    with writing(path) as draft:
        save_model(model, str(draft), metadata={"format": "pt"})


def load_checkpoint(path: Path, model: nn.Module) -> None:
    """Loads a state_dict (of torch.save or safetensors) or a compact file into the model.

    Raises:
        ValueError: there is no such file, it holds no state_dict, or it does not fit the model.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; expected a state_dict saved by torch.save or safetensors")
    try:
        if path.suffix != ".safetensors":
            model.load_state_dict({name.removeprefix("module."): value for name, value in _read_torch(path).items()})
            return
        with safe_open(path, framework="pt") as file:
            is_compact = (file.metadata() or {}).get("format") == FORMAT
        (load_compact(path, model) if is_compact else load_model(model, path))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error})") from None
    except RuntimeError as error:  # its first line names the model, its second the first difference
        problem = " ".join(line.strip() for line in str(error).splitlines()[1:2]) or str(error)
        raise ValueError(f"{path} does not fit the model: {problem}") from None


def _read_torch(path: Path) -> Mapping[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} contains more than tensors and plain values, and loading it could run code; "
            "save model.state_dict() with torch.save instead"
        ) from None
    except (RuntimeError, EOFError, KeyError) as error:
        raise ValueError(
            f"{path} is not a complete file of torch.save ({(str(error).splitlines() or [''])[0]})"
        ) from None
    if isinstance(found, Mapping):
        found = next((found[key] for key in INNER if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds a {type(found).__name__} and not a state_dict (name: tensor)")
    return found

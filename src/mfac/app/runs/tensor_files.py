"""Tensors on disk: weights for everybody (safetensors), and the state of a run that is not finished."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.runs.writing import writing
from mfac.pruning.atomic_file import replacing

INSTALL = "weights are written by safetensors; pip install 'torch-mfac[cli]'"


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes a model's state to a safetensors file, in full or not at all; a tensor with several names is there once.

    Raises:
        OSError: it cannot be written; a file that was there before still is.
        ImportError: safetensors is missing.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(INSTALL) from error
    names = first_names(model)
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor) and names[name] == name
    }
    with writing(path), replacing(path) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})


def first_names(model: nn.Module) -> dict[str, str]:
    """{name in the state: the first name of the same tensor}, for weights that are tied."""
    seen: dict[Any, str] = {}
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[name] = seen.setdefault(id(tensor), name)
    return names


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Writes plain values and tensors, in full or not at all.

    Raises:
        OSError: it cannot be written; a file that was there before still is.
    """
    with writing(path), replacing(path) as draft, open(draft, "wb") as file:
        torch.save(dict(state), file)


def load_state(path: Path) -> dict[str, Any] | None:
    """What `save_state` wrote; None if there is no such file."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state

"""Masks in and out: dicts, files, torch.nn.utils.prune, torch.ao.pruning, the zeros of a model; and a table of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mfac.layout import as_mask, match_masks, parameters_by_name, plain_name
from mfac.saved import read_tensors, write_tensors

FORMAT = "mfac-masks"
HEADER = ("layer", "shape", "weights", "removed", "sparsity", "")
Source = str | os.PathLike[str] | Mapping[str, Tensor] | nn.Module


def load_masks(source: Source) -> dict[str, Tensor]:
    """Reads masks as {plain parameter name: bool tensor, True = kept}.

    Args:
        source: a safetensors file; a dict of masks, or a state_dict with `weight_mask` entries of torch.nn.utils.prune;
            or a model prepared by torch.nn.utils.prune or torch.ao.pruning.

    Raises:
        ValueError: it has no mask, or one that does not hold zeros and ones.
    """
    if isinstance(source, nn.Module):
        found = masks_of_model(source)
        missing = "the model has no masks of torch's tools; for its zeros use mfac.masks_from_zeros(model)"
    else:
        entries = source if isinstance(source, Mapping) else read_tensors(source, "save_masks")[0]
        found, missing = _masks_of_mapping(entries), f"{'the dict' if entries is source else source} holds no mask"
    if not found:
        raise ValueError(missing)
    return found


def save_masks(masks: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Writes masks to a safetensors file as bool tensors, completely or not at all.

    Raises:
        ValueError: there is nothing to save, or a mask does not hold zeros and ones.
    """
    if not masks:
        raise ValueError("there are no masks to save")
    checked = {plain_name(name): as_mask(name, mask) for name, mask in masks.items()}
    tensors = {name: mask.detach().cpu().contiguous().clone() for name, mask in checked.items()}
    write_tensors(tensors, path, {"format": FORMAT, "kept": "true"})


def masks_of_model(model: nn.Module) -> dict[str, Tensor]:
    """The masks that torch.nn.utils.prune and torch.ao.pruning have put on a model; {} if there are none."""
    found = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            attribute = name.removesuffix("_mask")
            if attribute != name and f"{attribute}_orig" in own:  # an attention mask has no such companion
                found[f"{prefix}.{attribute}".lstrip(".")] = buffer
        for attribute in getattr(module, "parametrizations", {}):
            mask = _fake_sparsity(module, attribute)
            if mask is not None:
                found[f"{prefix}.{attribute}".lstrip(".")] = mask
    return {plain_name(name): as_mask(name, mask).clone() for name, mask in found.items()}


def masks_from_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Masks of a model's exact zeros, for parameters of two or more dimensions that have any.

    Biases and norms are left out: those initialised with zeros have not been pruned.
    """
    kept = {plain_name(name): p.detach() != 0 for name, p in model.named_parameters() if p.ndim >= 2}
    return {name: mask for name, mask in kept.items() if not bool(mask.all())}


def matched_masks(model: nn.Module, masks: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """The masks as bool tensors under the model's own names; raises ValueError if one does not fit."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    return {own[id(parameter)]: mask for _, parameter, mask in _matched(model, masks)}


@torch.no_grad()
def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Sets the removed weights of a model to zero, in place.

    Raises:
        ValueError: a name is unknown, or a mask does not fit; no weight is changed then.
    """
    for _, parameter, mask in _matched(model, masks):
        parameter.masked_fill_(~mask.to(parameter.device), 0)


def to_torch_prune(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Hands masks to torch.nn.utils.prune, as `weight_mask` beside `weight_orig`, multiplied by present ones."""
    from torch.nn.utils import prune

    for _, parameter, mask in _matched(model, masks):
        for module, attribute in _owners(model, parameter):
            prune.custom_from_mask(module, attribute, mask.to(parameter.device))


def to_torch_ao(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Hands masks to torch.ao.pruning: each masked weight gets a `FakeSparsity`, or a new mask in its present one."""
    from torch.ao.pruning.sparsifier.utils import FakeSparsity
    from torch.nn.utils import parametrize

    for _, parameter, mask in _matched(model, masks):
        for module, attribute in _owners(model, parameter):
            values, present = mask.to(parameter.device, parameter.dtype), _fake_sparsity(module, attribute)
            if present is None:
                parametrize.register_parametrization(module, attribute, FakeSparsity(values))
            else:
                present.copy_(values)


@dataclass(frozen=True)
class LayerSparsity:
    """One row of the table; `astray` counts weights that a mask removes but that are not zero."""

    name: str
    shape: tuple[int, ...]
    weights: int
    removed: int
    astray: int = 0

    @property
    def sparsity(self) -> float:
        return self.removed / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class SparsityReport:
    """The table: one row per parameter that could be pruned; `others` counts the weights of all others."""

    rows: tuple[LayerSparsity, ...]
    others: int

    @property
    def weights(self) -> int:
        return sum(row.weights for row in self.rows)

    @property
    def removed(self) -> int:
        return sum(row.removed for row in self.rows)

    @property
    def sparsity(self) -> float:
        return self.removed / self.weights if self.weights else 0.0

    def __str__(self) -> str:
        lines = [HEADER]
        for row in self.rows:
            note = f"{row.astray:,} not zero" if row.astray else ""
            lines.append((row.name, " x ".join(map(str, row.shape)), *_counts(row), note))
        lines += [("total", "", *_counts(self), ""), ("other parameters", "", f"{self.others:,}", "", "", "")]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        aligned = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>><", widths, strict=True))
        return "\n".join(aligned.format(*line).rstrip() for line in lines)


@torch.no_grad()
def sparsity_report(model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> SparsityReport:
    """Counts the removed weights of a model, layer by layer; `str()` of the report is a table.

    Args:
        model: any model, also one prepared by torch.nn.utils.prune or torch.ao.pruning.
        masks: the rows of the table, and what is removed. Without them, every parameter of two or more dimensions is a
            row, and the removed weights are those of the model's own masks, or its exact zeros.

    Raises:
        ValueError: a mask belongs to no parameter, or does not fit it.
    """
    given = masks if masks is not None else masks_of_model(model)
    found = {id(parameter): mask for _, parameter, mask in match_masks(given, parameters_by_name(model), "the model")}
    rows, others = [], 0
    for name, parameter in model.named_parameters():
        mask = found.get(id(parameter))
        if mask is None and (masks or parameter.ndim < 2):
            others += parameter.numel()
        else:
            removed = parameter == 0 if mask is None else ~mask.to(parameter.device)
            # Torch's tools keep the parameter's values and multiply them by the mask in the forward pass.
            astray = 0 if masks is None else int(torch.count_nonzero(parameter.masked_select(removed)))
            counts = parameter.numel(), int(removed.sum()), astray
            rows.append(LayerSparsity(plain_name(name), tuple(parameter.shape), *counts))
    return SparsityReport(tuple(rows), others)


def _masks_of_mapping(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All entries of a dict of masks; of a state_dict, the `_mask` entries with an `_orig` beside them."""
    paired = [key for key in entries if key.endswith("_mask") and f"{key.removesuffix('_mask')}_orig" in entries]
    return {plain_name(key.removesuffix("_mask")): as_mask(key, entries[key]).clone() for key in paired or entries}


def _matched(model: nn.Module, masks: Mapping[Any, Tensor]) -> list[tuple[Any, Tensor, Tensor]]:
    """(name, parameter, mask) of each mask, all checked before any is used."""
    if not masks:
        raise ValueError("masks is empty; give at least one {name: bool tensor}")
    return match_masks(masks, parameters_by_name(model), "the model")


def _owners(model: nn.Module, parameter: Tensor) -> set[tuple[nn.Module, str]]:
    """The modules that own a parameter, and the attribute's name before any reparametrisation."""
    found = set()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        path = name.split(".")
        if tensor is parameter and path[-1] == "original":  # fc.parametrizations.weight.original
            found.add((model.get_submodule(".".join(path[:-3])), path[-2]))
        elif tensor is parameter:
            found.add((model.get_submodule(".".join(path[:-1])), path[-1].removesuffix("_orig")))
    return found


def _fake_sparsity(module: nn.Module, attribute: str) -> Tensor | None:
    steps: Any = dict(getattr(module, "parametrizations", {}))
    return next((step.mask for step in steps.get(attribute, ()) if type(step).__name__ == "FakeSparsity"), None)


def _counts(row: LayerSparsity | SparsityReport) -> tuple[str, str, str]:
    return f"{row.weights:,}", f"{row.removed:,}", f"{100 * row.sparsity:.2f} %"

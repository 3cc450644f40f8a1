"""Parameters in groups, as every torch optimizer has them: names, masks, gradients, options, and saved states."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from mfac.columns import local, local_gradient
from mfac.layout import as_mask, find

Groups = Sequence[Mapping[str, Any]]
WINDOW_OPTIONS = {"num_grads", "damping", "normalize", "window", "masks", "update_every", "max_step_norm"}


def group_parameters(params: ParamsT, **defaults: Any) -> list[dict[str, Any]]:
    """The groups that a torch optimizer would make of tensors, named tensors or groups."""
    return type("_Grouped", (Optimizer,), {})(params, defaults).param_groups


def name_parameters(groups: Groups) -> dict[str, Tensor]:
    """{name: parameter} over all groups: the names that were given, or "parameter i"."""
    names: dict[Tensor, str] = {}
    for group in groups:
        for i, tensor in enumerate(group["params"]):  # torch only warns of duplicates
            names.setdefault(tensor, group["param_names"][i] if "param_names" in group else f"parameter {len(names)}")
    named = {name: tensor for tensor, name in names.items()}
    for tensor, name in names.items():
        if named[name] is not tensor:
            raise ValueError(f"two parameters are called {name!r}; give them different names, or none")
    return named


def name_masks(masks: Mapping[Any, Tensor] | None, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks by name, whether they were given by name or by parameter."""
    if masks is not None and not isinstance(masks, Mapping):
        raise ValueError(f"masks must be {{parameter or name: bool tensor}}, not {type(masks).__name__}")
    names = {id(tensor): name for name, tensor in named.items()}
    nameless = all(name.startswith("parameter ") for name in named)
    owner = "the optimizer" + " (give it model.named_parameters() to use names)" * nameless
    found = {names[id(find(key, named, owner))]: mask for key, mask in (masks or {}).items()}
    return {name: as_mask(name, mask, named[name].shape) for name, mask in found.items()}


def gradients_of(groups: Groups) -> dict[Tensor, Tensor]:
    """{parameter: its gradient}, negated in groups that maximize, plus the weight decay that is not decoupled."""
    gradients: dict[Tensor, Tensor] = {}
    for group in groups:
        params = [tensor for tensor in group["params"] if tensor.grad is not None]
        found = [local_gradient(tensor) for tensor in params]
        if any(gradient.is_sparse for gradient in found):
            sparse = [n for n, t in name_parameters(groups).items() if t.grad is not None and t.grad.is_sparse]
            raise RuntimeError(f"{', '.join(sparse)}: sparse gradients are not supported; build it with sparse=False")
        if group.get("maximize") and found:
            found = list(torch._foreach_neg(found))
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True) and found:
            found = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in found]
            found = list(torch._foreach_add(found, [local(tensor) for tensor in params], alpha=group["weight_decay"]))
        gradients.update(zip(params, found, strict=True))
    return gradients


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError for an option out of its range, or one that belongs to the whole window."""
    misplaced = WINDOW_OPTIONS & set(group)
    if misplaced:
        raise ValueError(f"{', '.join(sorted(misplaced))}: one for all groups; pass it to the optimizer, not a group")
    lr, momentum = group["lr"], group.get("momentum", 0.0)
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not one of {lr.numel()}")
    if not float(lr) >= 0:
        raise ValueError(f"lr must be 0 or more, not {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay must be 0 or more, not {group['weight_decay']}")
    if not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in group.get("betas", ())):
        raise ValueError(f"betas must be two numbers of at least 0 and below 1, not {group['betas']!r}")
    for name in ("eps", "power", "length"):
        if not 0 <= group.get(name, 0.0) < math.inf:
            raise ValueError(f"{name} must be 0 or more, and finite, not {group[name]!r}")
    if group.get("nesterov") and not momentum:
        raise ValueError("nesterov needs a momentum, and momentum is 0; pass one, for instance 0.9")


def read_state(state_dict: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
    """The window's shared state and {parameter: its entries}, from the state dict of an optimizer with these groups."""
    saved, state = state_dict.get("param_groups", ()), state_dict.get("state", {})
    keys = [key for group in saved for key in group["params"]]
    # torch.distributed.checkpoint returns what is not a tensor under str(key), and leaves the old value where it was.
    entries = {key: _merged(state.get(key, {}), state.get(str(key), {})) for key in keys}
    windows = [entry["window"] for entry in entries.values() if "window" in entry]
    if len(windows) != 1:
        raise ValueError("this state has no window of gradients, so another optimizer saved it; load one of this class")
    _check_groups(saved, groups)
    tensors = [tensor for group in groups for tensor in group["params"]]
    return windows[0], {tensor: entries[key] for key, tensor in zip(keys, tensors, strict=True) if entries[key]}


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**old, **new}
    for key in old.keys() & new.keys():
        if isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            merged[key] = _merged(old[key], new[key])
    return merged


def _check_groups(saved: Groups, groups: Groups) -> None:
    there, here = ([len(group["params"]) for group in each] for each in (saved, groups))
    if there != here:
        raise ValueError(
            f"saved with groups of {there} parameters, this one has groups of {here}; build it with the same"
        )
    for theirs, ours in zip(saved, groups, strict=True):
        for name, present in zip(theirs.get("param_names", ()), ours.get("param_names", ()), strict=False):
            if name != present:
                raise ValueError(
                    f"the state was saved with {name!r} where this optimizer has {present!r}; pass the parameters in "
                    "the same order"
                )

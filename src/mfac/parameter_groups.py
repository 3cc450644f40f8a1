"""Parameters in groups, as every torch optimizer has them: names, masks, gradients, options, and saved states."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from mfac.columns import local, local_gradient
from mfac.layout import match_masks

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
    """Copies of masks by name, on the devices of their parameters, whether given by name or by parameter."""
    names = {tensor: name for name, tensor in named.items()}
    nameless = all(name.startswith("parameter ") for name in named)
    owner = "the optimizer" + " (give it model.named_parameters() to use names)" * nameless
    matched = match_masks({} if masks is None else masks, named, owner)
    return {names[tensor]: mask.detach().to(tensor.device, copy=True) for _, tensor, mask in matched}


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


def check_last(groups: Groups, shared: Iterable[str]) -> None:
    """Raises ValueError if the last group has an option out of its range, or a value of its own for a `shared` one."""
    first, group = groups[0], groups[-1]
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not one of {group['lr'].numel()}")
    for name in ("lr", "weight_decay", "eps", "power", "length"):
        value = group.get(name, 0.0)
        if not isinstance(value, Real | Tensor) or not 0 <= float(value) < math.inf:
            raise ValueError(f"{name} must be 0 or more, and finite, not {value!r}")
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, such as (0.9, 0.99), not {betas!r}")
    for name, fractions in {"momentum": [group.get("momentum", 0.0)], "betas": betas}.items():
        if not all(isinstance(fraction, float | int) and 0 <= fraction < 1 for fraction in fractions):
            raise ValueError(f"{name} must be at least 0 and below 1, not {group[name]!r}")
    for name in ("nesterov", "decoupled_weight_decay", "maximize", "orthogonalize"):
        if group.get(name, False) not in (True, False):
            raise ValueError(f"{name} must be True or False, not {group[name]!r}")
    if group.get("nesterov") and not group["momentum"]:
        raise ValueError("nesterov needs a momentum, and momentum is 0; pass one, for instance 0.9")
    misplaced = WINDOW_OPTIONS & set(group) | {name for name in shared if group[name] != first[name]}
    if misplaced:
        raise ValueError(f"{', '.join(sorted(misplaced))}: one for all groups; pass it to the optimizer, not a group")


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
        found = f"saved with groups of {there} parameters, this one has groups of {here}"
        raise ValueError(f"{found}; build it with the same")
    for theirs, ours in zip(saved, groups, strict=True):
        if ("betas" in theirs) != ("betas" in ours):  # FullMatrixAdam has them, and MFAC has not
            raise ValueError("another class of optimizer saved this state, with rows of another kind; load its own")
        for name, present in zip(theirs.get("param_names", ()), ours.get("param_names", ()), strict=False):
            if name != present:
                found = f"the state was saved with {name!r} where this optimizer has {present!r}"
                raise ValueError(f"{found}; pass the parameters in the same order")

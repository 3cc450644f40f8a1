"""Parameters as an optimizer of torch has them: in groups, by name, and the states that were saved of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

GROUP_OPTIONS = {"lr", "momentum", "nesterov", "weight_decay", "decoupled_weight_decay", "maximize"}
WINDOW_OPTIONS = {"num_grads", "damping", "normalize", "window", "masks", "update_every", "max_step_norm"}


class _Listed(Optimizer):
    """Parameters as torch sorts any form of them into groups."""


def group_parameters(params: ParamsT, **defaults: Any) -> list[dict[str, Any]]:
    """The groups that an optimizer of torch would make of `params`, which are tensors, named tensors or groups."""
    return _Listed(params, defaults).param_groups


def name_parameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """{name: parameter} over all groups: the names that torch.optim was given, or the place in the order.

    Raises:
        ValueError: two parameters have the same name.
    """
    names: dict[Tensor, str] = {}
    for group in groups:
        for i, tensor in enumerate(group["params"]):  # torch only warns of one that is there twice
            names.setdefault(tensor, group["param_names"][i] if "param_names" in group else f"parameter {len(names)}")
    named = {name: tensor for tensor, name in names.items()}
    for tensor, name in names.items():
        if named[name] is not tensor:
            raise ValueError(f"two parameters are called {name!r}; give them different names, or none")
    return named


def name_masks(masks: Mapping[Any, Tensor] | None, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks by name, whether they were given by name or by parameter.

    Raises:
        ValueError: a key is no parameter of the optimizer, or a mask no tensor.
    """
    if masks is not None and not isinstance(masks, Mapping):
        raise ValueError(f"masks must be {{parameter or name: bool tensor}}, not {type(masks).__name__}")
    names = {tensor: name for name, tensor in named.items()}
    found = {}
    for key, mask in (masks or {}).items():
        name = names.get(key, "") if isinstance(key, Tensor) else key
        if name not in named:
            label = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            known = "give the optimizer model.named_parameters() to use names"
            known = known if all(n.startswith("parameter ") for n in named) else f"it has {', '.join(list(named)[:5])}"
            raise ValueError(f"masks: {label} is not a parameter of the optimizer; {known}")
        if not isinstance(mask, Tensor):
            raise ValueError(f"masks: {name!r} needs a bool tensor (True = kept), not {type(mask).__name__}")
        found[name] = mask
    return found


def read_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], dict[Tensor, dict[str, Any]]]:
    """What `shared_state` gave, and {parameter: its entry}, of the saved state of an optimizer with these groups.

    Raises:
        ValueError: there is no window in it, or the groups are not those.
    """
    saved, state = state_dict.get("param_groups", ()), state_dict.get("state", {})
    entries = {i: _entry(state, i) for group in saved for i in group["params"]}
    windows = [entry["window"] for entry in entries.values() if "window" in entry]
    if len(windows) != 1:
        raise ValueError(
            "this is not a state of MFAC: it has no window of gradients; was it saved by another optimizer?"
        )
    _check_groups(saved, groups)
    places = zip((i for group in saved for i in group["params"]), (t for g in groups for t in g["params"]), strict=True)
    return windows[0], {tensor: entries[i] for i, tensor in places if entries[i]}


def _entry(state: Mapping[Any, Any], place: Any) -> dict[str, Any]:
    """What a state has for one parameter."""
    entry, rest = state.get(place, {}), state.get(str(place), {})
    # torch.distributed.checkpoint gives back what is no tensor under str(place), and leaves the old value where it was.
    return _merged(entry, rest)


def _merged(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second one's where it is in both, and dicts entry by entry."""
    both = {**some, **others}
    for key in some.keys() & others.keys():
        if isinstance(some[key], Mapping) and isinstance(others[key], Mapping):
            both[key] = _merged(some[key], others[key])
    return both


def _check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a state whose groups of parameters are not those of the optimizer, as far as sizes and names tell."""
    there, here = ([len(group["params"]) for group in each] for each in (saved, groups))
    if there != here:
        raise ValueError(
            f"the state was saved with groups of {there} parameters, and this optimizer has groups of {here}; build it "
            "with the same parameters in the same groups"
        )
    for theirs, ours in zip(saved, groups, strict=True):
        for name, present in zip(theirs.get("param_names", ()), ours.get("param_names", ()), strict=False):
            if name != present:
                raise ValueError(
                    f"the state was saved with {name!r} where this optimizer has {present!r}; give the parameters in "
                    "the order in which they were when it was saved"
                )


def group_options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What groups are made with, in numbers that all ranks can compare."""
    numbers = [{name: group[name] for name in sorted(GROUP_OPTIONS)} for group in groups]
    return [{**options, "lr": float(options["lr"])} for options in numbers]


def check_group(group: Mapping[str, Any]) -> None:
    """Raises ValueError for an option out of its range, or one that belongs to the whole window."""
    misplaced = WINDOW_OPTIONS & set(group)
    if misplaced:
        raise ValueError(f"{', '.join(sorted(misplaced))}: one for the whole window; pass it to MFAC, not to a group")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, not one of {group['lr'].numel()}")
    if not float(group["lr"]) >= 0:
        raise ValueError(f"lr must be 0 or more, not {group['lr']}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, not {group['momentum']}")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"weight_decay must be 0 or more, not {group['weight_decay']}")
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov looks ahead of a momentum, and momentum is 0; give one, for instance 0.9")

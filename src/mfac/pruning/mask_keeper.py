"""Masks that hold while any optimizer trains: removed weights stay exactly zero."""

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.layout import by_plain_name, match_masks, parameters_by_name

Masks = Mapping[Any, Tensor]  # by name or by parameter


def attach_masks(optimizer: Optimizer, masks: Masks, model: nn.Module | None = None) -> "MaskKeeper":
    """Keeps removed weights, and the optimizer's state of them, at exactly zero under any torch optimizer.

    Before each step the gradients of removed weights are set to zero; after it the weights themselves, and the
    optimizer's momentum or averages of them. This is also done at once, and whenever the optimizer loads a state.

    Args:
        optimizer: any torch optimizer, also wrapped by accelerate or Lightning, under a GradScaler, or of DTensors.
        masks: {name or parameter: tensor of its shape, True or 1 = kept}.
        model: where names are looked up; without it, in those of an optimizer built from `named_parameters()`.

    Returns:
        A handle: `update(masks)` replaces the masks, `remove()` detaches them; it is a context manager too.

    Raises:
        ValueError: a name is unknown, a mask does not fit, or the optimizer does not have the parameters.
    """
    return MaskKeeper(optimizer, masks, model)


class MaskKeeper:
    """The handle that `attach_masks` returns; `remove()`, or the end of a `with`, detaches the masks."""

    def __init__(self, optimizer: Optimizer, masks: Masks, model: nn.Module | None = None):
        self._optimizer = innermost(optimizer)
        self._model = model
        self._masked = self._look_up(masks)
        self._hooks = self._attached()
        self.apply()

    def _attached(self) -> list[Any]:
        return [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(lambda *_: self.apply()),
            self._optimizer.register_load_state_dict_post_hook(lambda *_: self.apply()),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> "MaskKeeper":
        """With hooks of its own: torch copies none of an optimizer."""
        twin, parts = object.__new__(MaskKeeper), (self._optimizer, self._model, self._masked)
        twin._optimizer, twin._model, twin._masked = copy.deepcopy(parts, memo)
        twin._hooks = twin._attached() if self._hooks else []
        return twin

    def update(self, masks: Masks) -> None:
        """Replaces the masks; a parameter without a mask is free again. If one does not fit, the present ones stay."""
        self._masked = self._look_up(masks)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Sets the removed weights, and the optimizer's state of them, to zero."""
        for parameter, removed in self._removed():
            parameter.masked_fill_(removed, 0)
            state = self._optimizer.state.get(parameter, {})
            for value in state.values() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    value.masked_fill_(removed.to(value.device), 0)

    def remove(self) -> None:
        """Detaches the masks; weights that are zero may change again."""
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> "MaskKeeper":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _look_up(self, masks: Masks) -> list[tuple[Tensor, Tensor]]:
        groups, model = self._optimizer.param_groups, self._model
        pairs = [pair for g in groups for pair in zip(g.get("param_names", ()), g["params"], strict=False)]
        named = by_plain_name(dict(pairs)) if model is None else parameters_by_name(model)
        if not named and any(isinstance(key, str) for key in masks):
            known = "pass model=, or build the optimizer from model.named_parameters()"
            raise ValueError(f"masks are given by name, but the optimizer has no names; {known}")
        ours = {id(parameter): parameter for group in groups for parameter in group["params"]}
        others = {f"parameter {key}": ours[key] for key in ours.keys() - set(map(id, named.values()))}
        found = match_masks(masks, named | others, "the optimizer" if model is None else "the model")
        check_trained(self._optimizer, [parameter for _, parameter, _ in found], "masked parameters")
        return [(parameter, _laid_out(mask, parameter)) for _, parameter, mask in found]

    def _removed(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index, (parameter, mask) in enumerate(self._masked):
            if mask.device != parameter.device:  # the model was moved since
                self._masked[index] = parameter, mask.to(parameter.device)
            yield parameter, ~self._masked[index][1]

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        # Whatever mixes coordinates (norms, trust ratios, factored averages, curvature) would see the removed ones.
        for parameter, removed in self._removed():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.masked_fill_(removed, 0)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside the wrappers of accelerate, Lightning and others, whose hooks are called."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    return optimizer


def check_trained(optimizer: Optimizer, parameters: Collection[Tensor], what: str) -> None:
    """Raises ValueError if there are parameters, and none of them is in the optimizer."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if parameters and trained.isdisjoint(map(id, parameters)):
        absent = f"none of the {len(parameters)} {what} is in the optimizer"
        raise ValueError(f"{absent}; was the model copied after the optimizer was built?")


def _laid_out(mask: Tensor, parameter: Any) -> Tensor:
    """The mask on the parameter's device; in the same shards, if that is a DTensor."""
    mask = mask.to(parameter.device)
    if not hasattr(parameter, "device_mesh") or hasattr(mask, "device_mesh"):
        return mask
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(mask, parameter.device_mesh, parameter.placements)

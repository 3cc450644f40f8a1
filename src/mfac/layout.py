"""Parameters <-> flat vector: which parameters make up a row of G; and names and masks matched with parameters."""

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

Params = str | Tensor | Iterable[str | Tensor] | None
Masks = Mapping[str, Tensor] | Mapping[Tensor, Tensor] | None
Named = Mapping[str, Tensor]

# Parts of a name that torch.compile and FSDP put in; DataParallel and many checkpoints put `module.` before it.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")


class ParameterLayout:
    """The coordinates of a row: the chosen parameters in the order of `model.named_parameters()`, tied weights once.

    With masks, a row holds the kept coordinates only. The `full_*` attributes ignore the masks. `kept` holds the flat
    indices of each parameter's kept coordinates, or None where all are kept; `slots` are where they lie in a row.

    Args:
        model: where the parameters are looked up.
        params: names, `"re:..."` patterns (by `re.search`) or tensors; None: every trainable parameter. Frozen ones are
            taken where nothing trainable has that name.
        masks: {name or parameter: bool tensor of its shape, True = kept}.

    Raises:
        ValueError: a parameter is unknown, a mask does not fit, or no coordinate is kept.
    """

    def __init__(self, model: nn.Module, params: Params = None, masks: Masks = None):
        self._lay(_choose(model, params), parameters_by_name(model), "the model", masks)

    @classmethod
    def of_tensors(cls, named: Named, masks: Masks = None, complete: bool = True) -> "ParameterLayout":
        """The layout of {name: tensor} without a model; `complete` is False for shards, which may be empty."""
        layout = cls.__new__(cls)
        layout._lay(named, named, "the optimizer", masks, complete)
        return layout

    def _lay(self, chosen: Named, known: Named, owner: str, masks: Masks, complete: bool = True) -> None:
        found = {id(tensor): mask for _, tensor, mask in match_masks({} if masks is None else masks, known, owner)}
        self.names, self.tensors = tuple(chosen), tuple(chosen.values())
        self.kept = tuple(_kept_indices(tensor, found.get(id(tensor))) for tensor in self.tensors)
        self.masked = any(kept is not None for kept in self.kept)
        self.full_sizes = tuple(tensor.numel() for tensor in self.tensors)
        pairs = zip(self.full_sizes, self.kept, strict=True)
        self.sizes = tuple(size if kept is None else len(kept) for size, kept in pairs)
        self.full_dim, self.dim = sum(self.full_sizes), sum(self.sizes)
        self.full_slots, self.slots = _slots(self.full_sizes), _slots(self.sizes)
        if self.dim == 0 and complete:
            cause = "the masks keep no coordinate at all (True = kept)" if self.masked else "all parameters are empty"
            raise ValueError(f"{cause}; at least one is needed for a row")

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds every parameter."""
        return functools.reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @torch.no_grad()
    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, "d"]) -> None:
        """Writes one value per parameter (None is zero) into the row `out`, in its dtype and on its device."""
        parts = zip(self.tensors, values, self.kept, strict=True)
        pieces = [_kept_part(torch.zeros_like(t) if value is None else value, kept) for t, value, kept in parts]
        if all(piece.device == out.device for piece in pieces):
            torch.cat(pieces, out=out)
        else:
            for slot, piece in zip(self.slots, pieces, strict=True):
                out[slot].copy_(piece)

    def compress(self, full_rows: Float[Tensor, "k full_d"], out: Float[Tensor, "k d"]) -> None:
        """Writes the kept coordinates of rows without masks into `out`."""
        if not self.masked:
            out.copy_(full_rows)
            return
        for full_slot, slot, kept in zip(self.full_slots, self.slots, self.kept, strict=True):
            part = full_rows[:, full_slot]
            out[:, slot].copy_(part if kept is None else part.index_select(1, kept.to(part.device)))

    def unflatten(self, row: Float[Tensor, "d"]) -> dict[str, Tensor]:
        """{name: tensor of the parameter's shape}: views of `row` where there is no mask, zeros where one is False."""
        if row.shape != (self.dim,):
            raise ValueError(f"a row of this layout has shape ({self.dim},), this one has {tuple(row.shape)}")
        values = {}
        for name, tensor, slot, kept in zip(self.names, self.tensors, self.slots, self.kept, strict=True):
            part = row[slot]
            if kept is not None:
                part = row.new_zeros(tensor.numel()).index_copy_(0, kept.to(row.device), part)
            values[name] = part.view(tensor.shape)
        return values


def plain_name(name: str) -> str:
    """The name of a parameter in the bare model: without wrappers and without a pruning tool's reparametrisation.

    `module.fc.weight_orig` (torch.nn.utils.prune) and `fc.parametrizations.weight.original` are both `fc.weight`.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    if "parametrizations" in parts and parts[-1] == "original":
        parts = [part for part in parts[:-1] if part != "parametrizations"]
    return ".".join(parts).removesuffix("_orig")


def by_plain_name(named: Named) -> dict[str, Tensor]:
    """The tensors by their own names and by their plain ones."""
    return {plain_name(name): tensor for name, tensor in named.items()} | dict(named)


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by its own name and by its plain one; a tied weight by each of its names."""
    return by_plain_name(dict(model.named_parameters(remove_duplicate=False)))


def matching(item: str | Tensor, known: Named, argument: str, owner: str) -> dict[str, Tensor]:
    """The tensors that a name, a `"re:..."` pattern or a tensor stands for, by name; wrappers in a name do not matter.

    ValueError if `argument` matches no tensor of `owner`; the message has the nearest name.
    """
    if isinstance(item, Tensor):
        found = {name: tensor for name, tensor in known.items() if tensor is item}
    elif not isinstance(item, str):
        raise ValueError(f"{argument} takes names, 're:...' patterns and tensors, not {type(item).__name__}")
    elif item.startswith("re:"):
        try:
            pattern = re.compile(item[3:])
        except re.error as error:
            raise ValueError(f"{argument}: {item!r} is not a regular expression after 're:': {error}") from None
        found = {name: tensor for name, tensor in known.items() if pattern.search(name)}
    else:
        found = {name: known[name] for name in (item, plain_name(item)) if name in known}
    if not found:
        close = difflib.get_close_matches(item, known, n=1) if isinstance(item, str) else []
        hint = f"did you mean {close[0]!r}?" if close else f"it has {some(known)}"
        if isinstance(item, Tensor):
            hint = "was the model copied, or its parameters replaced, since?"
        raise ValueError(f"{argument}: {_label(item)} matches no parameter of {owner}; {hint}")
    return found


def match_masks(masks: Mapping[Any, Tensor], known: Named, owner: str) -> list[tuple[Any, Tensor, Tensor]]:
    """(key, parameter, bool mask) of each mask; raises ValueError if one of them does not fit."""
    if not isinstance(masks, Mapping):
        raise ValueError(f"masks must be {{parameter or name: bool tensor}}, not {type(masks).__name__}")
    found = {key: next(iter(matching(key, known, "masks", owner).values())) for key in masks}
    matched = [(key, tensor, as_mask(key, masks[key], tensor.shape)) for key, tensor in found.items()]
    first: dict[int, Tensor] = {}
    for key, tensor, mask in matched:
        if not torch.equal(first.setdefault(id(tensor), mask).to(mask.device), mask):
            raise ValueError(f"masks: {_label(key)} is another name of a weight whose mask differs; pass one of them")
    return matched


def as_mask(key: str | Tensor, mask: Tensor, shape: torch.Size | None = None) -> Tensor:
    """The mask as a bool tensor, converted if it holds zeros and ones; raises ValueError if it does not fit."""
    dense = isinstance(mask, Tensor) and mask.layout == torch.strided and not mask.is_meta
    if not dense or mask.shape != (mask.shape if shape is None else shape):
        found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        found += "" if dense or not isinstance(mask, Tensor) else ", sparse or on the meta device"
        wanted = "" if shape is None else f" of shape {tuple(shape)}"
        raise ValueError(f"masks: {_label(key)} needs a bool tensor{wanted}, this one is {found}")
    if mask.dtype == torch.bool:
        return mask
    kept = mask != 0
    if not torch.equal(mask, kept.to(mask.dtype)):
        raise ValueError(f"masks: {_label(key)} has other values than True or 1 for kept and False or 0 for removed")
    return kept


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, and how many more there are: for messages."""
    names = list(names) or ["no parameter at all"]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _label(item: str | Tensor) -> str:
    if isinstance(item, Tensor):
        return f"a tensor of shape {tuple(item.shape)}"
    return f"the pattern {item!r}" if item.startswith("re:") else repr(item)


def _choose(model: nn.Module, params: Params) -> dict[str, Tensor]:
    """The chosen parameters, {name: parameter}, in the model's order."""
    every = dict(model.named_parameters())
    if params is None:
        chosen: dict[str, Tensor] = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
        if not chosen:
            raise ValueError("the model has no trainable parameter; call requires_grad_(True) on those you want")
        return chosen
    known, wanted = parameters_by_name(model), set()
    for item in [params] if isinstance(params, str | Tensor) else params:
        found = list(matching(item, known, "params", "the model").values())
        found = [tensor for tensor in found if tensor.requires_grad] or found  # frozen ones if no other has that name
        if not all(tensor.is_floating_point() for tensor in found):
            raise ValueError(f"params: {_label(item)} is not of floating-point numbers, so it has no gradient")
        wanted |= set(map(id, found))
    if not wanted:
        raise ValueError("params is empty; name at least one parameter, or pass None for every trainable one")
    return {name: tensor for name, tensor in every.items() if id(tensor) in wanted}


def _kept_indices(tensor: Tensor, mask: Tensor | None) -> Tensor | None:
    """The flat indices of the kept coordinates; None where all of them are."""
    if mask is None or bool(mask.all()):
        return None
    return mask.to(tensor.device).flatten().nonzero().squeeze(1)


def _kept_part(value: Tensor, kept: Tensor | None) -> Tensor:
    flat = (value.to_dense() if value.is_sparse else value).reshape(-1)  # embeddings may have sparse gradients
    return flat if kept is None else flat.index_select(0, kept)


def _slots(sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True))

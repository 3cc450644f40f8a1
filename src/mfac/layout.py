"""Parameters <-> flat vector: which parameters make up a row of G, in what order, and where each of them lies."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

Params = str | Tensor | Iterable[str | Tensor] | None
Masks = Mapping[str, Tensor] | Mapping[Tensor, Tensor] | None


class ParameterLayout:
    """The coordinates of a row: the chosen parameters in the order of `model.named_parameters()`, tied weights once.

    With masks, only the kept coordinates are in a row. `full_*` speaks of the parameters without their masks.

    Args:
        model: where the parameters are looked up.
        params: names, `"re:..."` patterns (by `re.search`) or tensors; None is every trainable parameter.
        masks: {name or parameter: bool tensor of its shape, True = kept}; parameters without a mask are kept whole.

    Raises:
        ValueError: a parameter that is not there or not trainable, a mask that does not fit, or nothing left to keep.
    """

    def __init__(self, model: nn.Module, params: Params = None, masks: Masks = None):
        named = dict(model.named_parameters(remove_duplicate=False))  # masks may call a tied weight by either name
        self._lay(_choose(model, params), _masks_by_parameter(named, masks, "the model"))

    @classmethod
    def of_tensors(cls, named: Mapping[str, Tensor], masks: Masks = None, complete: bool = True) -> "ParameterLayout":
        """The layout of tensors that come without a model, in their order, as an optimizer has them.

        Args:
            named: {name: tensor}.
            masks: as for any layout.
            complete: False for pieces of parameters, of which there may be none here.
        """
        layout = cls.__new__(cls)
        layout._lay(named, _masks_by_parameter(named, masks, "the optimizer"), complete)
        return layout

    def _lay(self, chosen: Mapping[str, Tensor], found: dict[int, Tensor], complete: bool = True) -> None:
        self.names: tuple[str, ...] = tuple(chosen)
        self.tensors: tuple[Tensor, ...] = tuple(chosen.values())
        self.full_sizes: tuple[int, ...] = tuple(tensor.numel() for tensor in self.tensors)
        self.full_dim: int = sum(self.full_sizes)
        self.kept: tuple[Tensor | None, ...] = tuple(
            _kept_indices(name, tensor, found.get(id(tensor))) for name, tensor in chosen.items()
        )
        self.sizes: tuple[int, ...] = tuple(
            size if kept is None else len(kept) for size, kept in zip(self.full_sizes, self.kept, strict=True)
        )
        self.dim: int = sum(self.sizes)
        if self.dim == 0 and complete:
            raise ValueError("the masks keep no coordinate at all (True = kept); at least one is needed for a row")

    @property
    def masked(self) -> bool:
        """Whether some coordinate is left out."""
        return any(kept is not None for kept in self.kept)

    @property
    def dtype(self) -> torch.dtype:
        """The type that holds every parameter: that of all of them, as a rule."""
        dtype = self.tensors[0].dtype
        for tensor in self.tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return self.tensors[0].device

    @property
    def full_slots(self) -> tuple[slice, ...]:
        """Where each parameter lies in a row that has no masks."""
        return _slots(self.full_sizes)

    @property
    def slots(self) -> tuple[slice, ...]:
        """Where the kept coordinates of each parameter lie in a row."""
        return _slots(self.sizes)

    def views(self, rows: Float[Tensor, "c d"]) -> list[tuple[Tensor, ...]]:
        """For each row without masks, its parts, each in the shape of its parameter."""
        parts = zip(rows.split(self.full_sizes, 1), self.tensors, strict=True)
        return list(zip(*(part.view(len(rows), *tensor.shape).unbind() for part, tensor in parts), strict=True))

    def dense(self, values: Sequence[Tensor | None], positions: Sequence[int] | None = None) -> list[Tensor]:
        """One value a parameter, each as a plain tensor: zeros for None. Embeddings may have sparse gradients.

        With `positions`, only for those parameters.
        """
        tensors = self.tensors if positions is None else [self.tensors[position] for position in positions]
        return [
            torch.zeros_like(tensor) if value is None else value.to_dense() if value.is_sparse else value
            for value, tensor in zip(values, tensors, strict=True)
        ]

    @torch.no_grad()
    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, "d"]) -> None:
        """Writes one value a parameter (None is zero) into the row `out`, in the type and on the device of `out`."""
        pieces = [_kept_part(value, kept) for value, kept in zip(self.dense(values), self.kept, strict=True)]
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


def _choose(model: nn.Module, params: Params) -> dict[str, Tensor]:
    """The chosen parameters, {name: parameter}, in the model's order."""
    every = dict(model.named_parameters())
    if params is None:
        chosen: dict[str, Tensor] = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
        if not chosen:
            raise ValueError("the model has no trainable parameter; call requires_grad_(True) on those you want")
        return chosen
    wanted: set[int] = set()
    for item in [params] if isinstance(params, str | Tensor) else params:
        wanted.update(_matches(model, item))
    if not wanted:
        raise ValueError("params is empty; name at least one parameter, or pass None for every trainable one")
    return {name: tensor for name, tensor in every.items() if id(tensor) in wanted}


def _matches(model: nn.Module, item: str | Tensor) -> set[int]:
    """The ids of the trainable parameters that one name, pattern or tensor stands for."""
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied weight may be called by either name
    if isinstance(item, Tensor):
        found = {name: tensor for name, tensor in named.items() if tensor is item}
        label = f"a tensor of shape {tuple(item.shape)}"
    elif item.startswith("re:"):
        found = {name: tensor for name, tensor in named.items() if re.search(item[3:], name)}
        label = f"the pattern {item!r}"
    else:
        found = {item: named[item]} if item in named else {}
        label = f"{item!r}"
    if not found:
        close = difflib.get_close_matches(item, named, n=1) if isinstance(item, str) else []
        hint = f"did you mean {close[0]!r}?" if close else f"it has {some(named)}"
        raise ValueError(f"params: {label} matches no parameter of the model; {hint}")
    trainable = {id(tensor) for tensor in found.values() if tensor.requires_grad}
    if not trainable:
        raise ValueError(f"params: {label} matches only frozen parameters; call requires_grad_(True) on {some(found)}")
    return trainable


def _masks_by_parameter(named: Mapping[str, Tensor], masks: Masks, owner: str) -> dict[int, Tensor]:
    """{id of the parameter: mask}, for masks given by name or by parameter."""
    ids = {id(tensor) for tensor in named.values()}
    found = {}
    for key, mask in (masks or {}).items():
        parameter = named.get(key) if isinstance(key, str) else key
        if parameter is None or id(parameter) not in ids:
            label = repr(key) if isinstance(key, str) else f"a tensor of shape {tuple(key.shape)}"
            raise ValueError(f"masks: {label} is not a parameter of {owner}; it has {some(named)}")
        found[id(parameter)] = mask
    return found


def _kept_indices(name: str, tensor: Tensor, mask: Tensor | None) -> Tensor | None:
    """The flat indices of the kept coordinates; None where all of them are."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.shape != tensor.shape:
        raise ValueError(
            f"masks: {name!r} needs a bool tensor of shape {tuple(tensor.shape)} (True = kept), "
            f"this one is {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if bool(mask.all()):
        return None
    return mask.to(tensor.device).flatten().nonzero().squeeze(1)


def _kept_part(value: Tensor, kept: Tensor | None) -> Tensor:
    flat = value.reshape(-1)
    return flat if kept is None else flat.index_select(0, kept)


def _slots(sizes: Sequence[int]) -> tuple[slice, ...]:
    slots, start = [], 0
    for size in sizes:
        slots.append(slice(start, start + size))
        start += size
    return tuple(slots)


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first few names, and how many more there are: for messages."""
    names = list(names)
    if not names:
        return "no parameter at all"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

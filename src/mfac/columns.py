"""The columns of a window that this process holds: all of them, or its part where several ranks share them.

A row of the window holds the gradients of all parameters side by side. With several ranks each one holds some columns,
products with the window are summed over the ranks, and the m x m algebra is the same on all of them.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from mfac.inverse_fisher import Ranks, ranks_of
from mfac.layout import Named, ParameterLayout


class Columns:
    """Every column, in one process. `ChunkedColumns` and `PlacedColumns` do the same for several ranks.

    `layout` is of this rank's pieces, where parameters are DTensors, and so are `masks` then. `dim` is the number of
    columns here (at least 1), and `spans` are where the columns of each parameter lie in a row.
    """

    def __init__(self, named: Named, masks: Named, layout: ParameterLayout | None = None):
        self.layout = ParameterLayout.of_tensors(named, masks) if layout is None else layout
        self.named, self.masks = dict(named), masks
        self.tensors, self.covered = tuple(named.values()), set(named.values())
        self.spans, self.dim = self.layout.slots, max(self.layout.dim, 1)

    def meet(self) -> None:
        """Learns what is needed of the other ranks; collective."""

    def place(self, number: int) -> tuple[int, int]:
        """The start and stop of the columns here, counted within the whole parameter."""
        return 0, self.layout.sizes[number]

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        """Writes the columns of one value per parameter into `out`; None is zero."""
        self.layout.flatten(values, out=out)

    def finish(self, step: Float[Tensor, " d"], sums: Float[Tensor, " n"]) -> tuple[list[Tensor], Float[Tensor, " n"]]:
        """The step of each parameter; and the sums, over all ranks if the step is gathered, else unchanged."""
        return list(self.layout.unflatten(step[: self.layout.dim]).values()), sums

    def total(self, sums: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Adds up over the ranks what was computed from parts that `finish` returned, or the sums it returned."""
        return sums

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        """A parameter's columns as they are saved: [m, *shape], or [m, kept weights]."""
        return rows.view(len(rows), *self._state_shape(number))

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        """The columns of a parameter, from its saved state."""
        return _unsharded(self.layout.names[number], state["rows"]).flatten(1)

    def _state_shape(self, number: int) -> tuple[int, ...]:
        whole = tuple(self.tensors[number].shape) or (1,)
        return whole if self.layout.kept[number] is None else (self.layout.sizes[number],)


def columns_of(named: Named, masks: Named, ranks: Ranks) -> Columns:
    """The columns that this process holds; ValueError if parameters cannot be divided or masks do not fit."""
    masks = {name: mask for name, mask in masks.items() if name in named}
    placed = any(is_placed(tensor) for tensor in named.values())
    if ranks.size == 1 and not placed:
        return Columns(named, masks)
    from mfac.distributed.columns import ChunkedColumns, PlacedColumns

    return (PlacedColumns if placed else ChunkedColumns)(named, masks, ranks)


def parameter_ranks(named: Named, group: ProcessGroup | None) -> Ranks:
    """The ranks that share the columns: those of the group, or of the mesh of DTensor parameters."""
    if not any(is_placed(tensor) for tensor in named.values()):
        return ranks_of(group)
    if group is not None:
        raise ValueError("DTensor parameters bring the ranks of their own mesh; leave process_group out")
    from mfac.distributed.columns import shardings

    first = shardings(named)[0]
    return ranks_of(first.mesh.get_group(first.mesh_dim))


def is_placed(tensor: Tensor | None) -> bool:
    """Whether it is a DTensor, without importing torch.distributed.tensor, which is slow, where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, in its own memory; any other tensor as it is."""
    piece: Tensor = tensor.to_local() if is_placed(tensor) else tensor  # type: ignore[attr-defined]
    return piece


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's piece of a gradient; RuntimeError if it has other placements than its parameter."""
    gradient: Any = parameter.grad
    if is_placed(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"a gradient has the placements {gradient.placements} and its parameter "
            f"{parameter.placements}; redistribute the gradient to those first"  # type: ignore[attr-defined]
        )
    return local(gradient)


def like(name: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a saved value, in `dtype`, with the device and the placements of the parameter, and of its shape."""
    if value.shape != parameter.shape:
        shapes = f"{list(value.shape)} for a parameter {list(parameter.shape)}"
        raise ValueError(f"the state has {name} of shape {shapes}; was it saved with another model?")
    if is_placed(parameter):
        from mfac.distributed.columns import placed_like

        return placed_like(name, value, parameter, dtype)
    return _unsharded(name, value).to(parameter.device, dtype, copy=True)


def _unsharded(name: str, value: Any) -> Tensor:
    if is_placed(value) and value.device_mesh.size() > 1:
        raise ValueError(
            f"the saved state of {name} is sharded over {value.device_mesh.size()} ranks; save and load it with "
            "torch.distributed.checkpoint, which reshards it"
        )
    return local(value)

"""The columns of a window that this process holds: all of them, or its part where several ranks share them.

A row of the window holds the gradients of all parameters side by side. With several ranks each one holds some columns,
products with the window are summed over the ranks, and the m x m algebra is the same on all of them.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from mfac.inverse_fisher import Ranks, ranks_of
from mfac.layout import ParameterLayout

if TYPE_CHECKING:
    from mfac.distributed.chunked import ChunkedColumns
    from mfac.distributed.placed import PlacedColumns

Columns: TypeAlias = "AllColumns | ChunkedColumns | PlacedColumns"


class AllColumns:
    """Every column, in one process. `ChunkedColumns` and `PlacedColumns` have the same methods for several ranks.

    `tensors` are the parameters, `layout` their layout (of this rank's pieces, where they are DTensors), `dim` the
    number of columns here (at least 1), and `spans` where the columns of each parameter lie in a row.
    """

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor]):
        self.ranks = Ranks()
        self.layout = ParameterLayout.of_tensors(named, masks)
        self.tensors = self.layout.tensors
        self.spans = self.layout.slots
        self.dim = self.layout.dim

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
        return list(self.layout.unflatten(step).values()), sums

    def total(self, sums: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Adds up over the ranks what was computed from parts that `finish` returned, or the sums it returned."""
        return sums

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        """A parameter's columns as they are saved: [m, *shape], or [m, kept weights]."""
        return rows.view(len(rows), *saved_shape(self.layout, number))

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        """The columns of a parameter, from its saved state."""
        return unsharded(self.layout.names[number], state["rows"]).flatten(1)


def columns_of(named: Mapping[str, Tensor], masks: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Columns:
    """The columns that this process holds; ValueError if parameters cannot be divided or masks do not fit."""
    ranks = parameter_ranks(named, group)
    if any(is_placed(tensor) for tensor in named.values()):
        from mfac.distributed.placed import PlacedColumns

        return PlacedColumns(named, masks, ranks)
    if ranks.size == 1:
        return AllColumns(named, masks)
    from mfac.distributed.chunked import ChunkedColumns

    return ChunkedColumns(named, masks, ranks)


def parameter_ranks(named: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Ranks:
    """The ranks that share the columns: those of the group, or of the mesh of DTensor parameters."""
    if not any(is_placed(tensor) for tensor in named.values()):
        return ranks_of(group)
    if group is not None:
        raise ValueError("DTensor parameters bring the ranks of their own mesh; leave process_group out")
    from mfac.distributed.placements import shardings

    first = next(iter(shardings(named).values()))
    return ranks_of(first.mesh.get_group(first.mesh_dim))


def saved_shape(layout: ParameterLayout, number: int) -> tuple[int, ...]:
    """The shape of a parameter's columns in a saved state: its own, or the number of its kept weights."""
    if layout.kept[number] is not None:
        return (layout.sizes[number],)
    return tuple(layout.tensors[number].shape) or (1,)


def is_placed(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without importing torch.distributed.tensor, which is slow, where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, in its own memory; any other tensor as it is."""
    piece: Tensor = tensor.to_local() if is_placed(tensor) else tensor  # type: ignore[attr-defined]
    return piece


def local_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's pieces of tensors, either all or none of which are DTensors."""
    return [local(tensor) for tensor in tensors] if tensors and is_placed(tensors[0]) else list(tensors)


def local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's pieces of gradients; RuntimeError if one has other placements than its parameter."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and is_placed(gradients[0]):
        from mfac.distributed.placements import check_gradient

        for parameter, gradient in zip(parameters, gradients, strict=True):
            check_gradient(parameter, gradient)
    return local_pieces(gradients)


def like(name: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a saved value, in `dtype`, with the device and the placements of the parameter."""
    if is_placed(parameter):
        from mfac.distributed.placements import placed_like

        return placed_like(name, value, parameter, dtype)
    return unsharded(name, value).to(parameter.device, dtype, copy=True)


def unsharded(name: str, value: Tensor) -> Tensor:
    """A saved value as a plain tensor; ValueError if it is sharded over several ranks."""
    if is_placed(value) and value.device_mesh.size() > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"the saved state of {name} is sharded over {value.device_mesh.size()} ranks; "  # type: ignore[attr-defined]
            "save and load it with torch.distributed.checkpoint, which reshards it"
        )
    return local(value)

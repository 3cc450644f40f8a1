"""Columns of parameters that every rank has whole, as in data-parallel training: each holds a chunk of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.distributed.columns import Figures, saved_shape
from mfac.distributed.groups import Ranks
from mfac.distributed.placements import as_placed, is_placed, local
from mfac.layout import ParameterLayout


class ChunkedColumns:
    """One chunk of every parameter, of parameters that every rank has whole (data parallel).

    Chunks are those of `torch.chunk` along the first dimension, or over the kept weights where there is a mask: so
    `torch.distributed.checkpoint` can cut them anew. Every rank has as many columns as the first; those behind the end
    of a parameter are zeros. Steps are gathered, so all ranks move their weights by the same numbers.
    """

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor], ranks: Ranks):
        self.ranks = ranks
        self.layout = layout = ParameterLayout.of_tensors(named, masks)
        self.tensors = layout.tensors
        counts = [saved_shape(layout, number)[0] for number in range(len(layout.names))]
        widths = [-(-n // ranks.size) * (size // max(n, 1)) for n, size in zip(counts, layout.sizes, strict=True)]
        self._starts = [min(ranks.rank * width, size) for width, size in zip(widths, layout.sizes, strict=True)]
        self._stops = [min(start + w, size) for start, w, size in zip(self._starts, widths, layout.sizes, strict=True)]
        lefts = [sum(widths[:number]) for number in range(len(widths))]
        self._slots = [slice(left, left + width) for left, width in zip(lefts, widths, strict=True)]
        mine = zip(lefts, self._starts, self._stops, strict=True)
        self.spans = tuple(slice(left, left + stop - start) for left, start, stop in mine)
        self.dim = sum(widths)
        self._mesh: Any = None

    def meet(self) -> None:
        """All have the same parameters, so each knows the chunks of the others."""

    def place(self, number: int) -> tuple[int, int]:
        """This rank's chunk."""
        return self._starts[number], self._stops[number]

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        """This rank's chunk of every value."""
        pieces = []
        for number, value in enumerate(values):
            slot, span = self._slots[number], self.spans[number]
            if value is None:
                span = slice(slot.start, slot.start)
            else:
                pieces.append(self._chunk(number, value))
            if span.stop < slot.stop:
                pieces.append(torch.zeros(slot.stop - span.stop, dtype=out.dtype, device=out.device))
        torch.cat([piece.to(out.device) for piece in pieces], out=out)

    def finish(self, step: Float[Tensor, " d"], figures: Figures) -> tuple[list[Tensor], Figures]:
        """The chunks of all ranks, and their figures, in one gathering."""
        packed = torch.cat((step, figures.to(step)))
        everything = self.ranks.gather(packed[None], [1] * self.ranks.size)
        parts = []
        for number, tensor in enumerate(self.tensors):
            part = everything[:, self._slots[number]].reshape(-1)[: self.layout.sizes[number]]
            kept = self.layout.kept[number]
            if kept is not None:
                part = part.new_zeros(tensor.numel()).index_copy_(0, kept.to(part.device), part)
            parts.append(part.view(tensor.shape))
        return parts, _united(everything[:, -3:])

    def total(self, figures: Figures) -> Figures:
        """They came with the step."""
        return figures

    def length(self, norm: Tensor) -> Tensor:
        """It is: every rank has the whole step."""
        return norm

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        """A DTensor, cut along its first dimension but one."""
        if self._mesh is None:
            from torch.distributed.device_mesh import DeviceMesh

            assert self.ranks.group is not None
            self._mesh = DeviceMesh.from_group(self.ranks.group, rows.device.type)
        n, *rest = saved_shape(self.layout, number)
        shape = len(rows), n, *rest
        unit = self.layout.sizes[number] // max(n, 1)
        return as_placed(rows.view(len(rows), rows.shape[1] // max(unit, 1), *rest), self._mesh, 0, 1, shape)

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        """The chunk that was loaded here, or this rank's of what was saved whole."""
        rows, start, stop = state["rows"], self._starts[number], self._stops[number]
        if not is_placed(rows):
            return rows.flatten(1)[:, start:stop]
        piece = local(rows).flatten(1)
        if piece.shape[1] != stop - start:
            raise ValueError(
                f"the saved state of {self.layout.names[number]} is cut for other ranks: {piece.shape[1]} columns are "
                f"here, {stop - start} belong here; save and load it with torch.distributed.checkpoint"
            )
        return piece

    def _chunk(self, number: int, value: Tensor) -> Tensor:
        flat, kept = value.reshape(-1), self.layout.kept[number]
        chunk = slice(self._starts[number], self._stops[number])
        return flat[chunk] if kept is None else flat.index_select(0, kept[chunk])


def _united(figures: Float[Tensor, "ranks 3"]) -> Figures:
    """Norms and products of whole vectors, from those of their pieces."""
    norms = torch.linalg.vector_norm(figures[:, :2], dim=0)
    return torch.cat((norms, figures[:, 2].sum(0, keepdim=True)))

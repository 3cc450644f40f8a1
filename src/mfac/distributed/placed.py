"""Columns of parameters that are DTensors, as FSDP2 makes them: each rank holds those of its shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.distributed.columns import Figures
from mfac.distributed.groups import Ranks
from mfac.distributed.placements import (
    Cut,
    as_placed,
    as_uneven,
    common_cut,
    is_placed,
    local,
    piece_of,
    uneven_piece,
)
from mfac.layout import ParameterLayout


class PlacedColumns:
    """The columns of this rank's shards, of parameters that are DTensors (FSDP2). Nothing but products is summed."""

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor], ranks: Ranks):
        self._cuts = list(common_cut(named).values())
        self.ranks = ranks
        self.tensors = tuple(named.values())
        pieces = {name: local(tensor) for name, tensor in named.items()}
        self._masked = set(masks)
        self.layout = ParameterLayout.of_tensors(pieces, self._pieces_of(named, masks), complete=False)
        self.spans = self.layout.slots
        self.dim = max(self.layout.dim, 1)
        self._before: list[int] | None = None  # kept weights of each parameter on the ranks before this one
        self._totals: list[int] = []

    def meet(self) -> None:
        """How many weights masks have left to the others."""
        if self._masked:
            counts = self.ranks.gather(
                torch.tensor([self.layout.sizes], device=self.layout.device), [1] * self.ranks.size
            )
            self._before, self._totals = counts[: self.ranks.rank].sum(0).tolist(), counts.sum(0).tolist()

    def place(self, number: int) -> tuple[int, int]:
        """The columns of this rank's piece, which follow one another where it is cut along the first dimension."""
        cut, shape = self._cuts[number], self.tensors[number].shape
        if cut.dim != 0:
            raise ValueError(
                f"{self.layout.names[number]} is cut along its dimension {cut.dim}, and its columns do not follow one "
                "another, as those of a window that was saved whole and compressed do; save it from ranks like these"
            )
        start = cut.span(shape[0]).start * shape[1:].numel() if self._before is None else self._before[number]
        return start, start + self.layout.sizes[number]

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        """This rank's pieces."""
        out[self.layout.dim :] = 0
        self.layout.flatten([None if value is None else local(value) for value in values], out=out[: self.layout.dim])

    def finish(self, step: Float[Tensor, " d"], figures: Figures) -> tuple[list[Tensor], Figures]:
        """Views of the step, for the pieces of the parameters."""
        return list(self.layout.unflatten(step[: self.layout.dim]).values()), figures

    def total(self, figures: Figures) -> Figures:
        """A sum over ranks, all of which have to ask."""
        squares = torch.stack((figures[0].square(), figures[1].square(), figures[2]))
        gradient, step, product = self.ranks.sum_(squares)
        return torch.stack((gradient.sqrt(), step.sqrt(), product))

    def length(self, norm: Tensor) -> Tensor:
        """A sum over ranks, of one number."""
        return self.ranks.sum_(norm.square()).sqrt()

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        """A DTensor that is cut as the parameter is."""
        cut, shape = self._cuts[number], self.tensors[number].shape
        if self.layout.names[number] in self._masked:
            return as_uneven(rows, cut.mesh, cut.mesh_dim, self.place(number)[0], self._totals[number])
        piece = rows.view(len(rows), *local(self.tensors[number]).shape)
        return as_placed(piece, cut.mesh, cut.mesh_dim, cut.dim + 1, (len(rows), *shape))

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        """The piece that was loaded here, or this rank's of what was saved whole."""
        rows, cut = state["rows"], self._cuts[number]
        if self.layout.names[number] in self._masked:
            return uneven_piece(rows) if is_placed(rows) else rows[:, slice(*self.place(number))]
        if not is_placed(rows):
            span = cut.span(self.tensors[number].shape[cut.dim])
            return rows.movedim(cut.dim + 1, 1)[:, span].movedim(1, cut.dim + 1).flatten(1)
        piece = local(rows)
        if piece.shape[1:] != local(self.tensors[number]).shape:
            raise ValueError(
                f"the saved state of {self.layout.names[number]} is cut for other ranks; save and load it with "
                "torch.distributed.checkpoint"
            )
        return piece.flatten(1)

    def _pieces_of(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cuts: dict[str, Cut] = dict(zip(named, self._cuts, strict=True))
        for name in masks:
            if cuts[name].dim != 0:
                raise ValueError(
                    f"masks: {name} is cut along its dimension {cuts[name].dim}, and masks need Shard(0), which "
                    "fully_shard makes"
                )
        return {name: piece_of(name, mask, named[name], cuts[name]) for name, mask in masks.items()}

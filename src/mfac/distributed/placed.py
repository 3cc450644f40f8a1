"""Columns of parameters that are DTensors, as FSDP2 makes them: each rank holds those of its shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.columns import Columns, is_placed, local
from mfac.distributed.placements import placed_like, sharded, sharded_unevenly, shardings, uneven_piece
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout


class PlacedColumns(Columns):
    """The columns of this rank's shards. Steps stay on their ranks; only products with the window are summed."""

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor], ranks: Ranks):
        self._shardings, self._ranks = shardings(named), ranks
        for name, sharding in zip(named, self._shardings, strict=True):
            if name in masks and sharding.dim != 0:
                raise ValueError(
                    f"masks: {name} is sharded along dimension {sharding.dim}, and masks need Shard(0), as fully_shard "
                    "makes it"
                )
        placed = {name: placed_like(name, mask, named[name], torch.bool) for name, mask in masks.items()}
        pieces, kept = ({name: local(tensor) for name, tensor in each.items()} for each in (named, placed))
        self._lay(named, placed, ParameterLayout.of_tensors(pieces, kept, complete=False))
        self._before, self._totals = list[int](), list[int]()  # kept weights on the ranks before this one, and on all

    def meet(self) -> None:
        if self.masks:
            sizes = torch.tensor([self.layout.sizes], device=self.layout.device)
            counts = self._ranks.gather(sizes, [1] * self._ranks.size)
            self._before, self._totals = counts[: self._ranks.rank].sum(0).tolist(), counts.sum(0).tolist()

    def place(self, number: int) -> tuple[int, int]:
        sharding, shape = self._shardings[number], self.tensors[number].shape
        if sharding.dim != 0:
            raise ValueError(
                f"{self.layout.names[number]} is sharded along dimension {sharding.dim}, so its columns are not "
                "contiguous in a compressed window that one process saved; load it on ranks like those that saved it"
            )
        start = self._before[number] if self._before else sharding.span(shape[0]).start * shape[1:].numel()
        return start, start + self.layout.sizes[number]

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        out[self.layout.dim :] = 0
        self.layout.flatten(values, out=out[: self.layout.dim])

    def finish(self, step: Float[Tensor, " d"], sums: Float[Tensor, " n"]) -> tuple[list[Tensor], Float[Tensor, " n"]]:
        return super().finish(step[: self.layout.dim], sums)

    def total(self, sums: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return self._ranks.sum_(sums.clone())

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        sharding, tensor = self._shardings[number], self.tensors[number]
        if self.layout.names[number] in self.masks:
            return sharded_unevenly(rows, sharding, self.place(number)[0], self._totals[number])
        return sharded(rows.view(len(rows), *local(tensor).shape), sharding, tensor.shape)

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        name, rows, sharding = self.layout.names[number], state["rows"], self._shardings[number]
        if name in self.masks:
            return uneven_piece(rows) if is_placed(rows) else rows[:, slice(*self.place(number))]
        piece = local(rows) if is_placed(rows) else sharding.piece(rows, sharding.dim + 1)
        if piece.shape[1:] != local(self.tensors[number]).shape:
            raise ValueError(
                f"the saved state of {name} is sharded for other ranks; save and load it with "
                "torch.distributed.checkpoint"
            )
        return piece.flatten(1)

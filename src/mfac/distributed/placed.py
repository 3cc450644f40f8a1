"""Columns of parameters that are DTensors, as FSDP2 makes them: each rank holds those of its shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.columns import is_placed, local
from mfac.distributed.placements import piece_of, sharded, sharded_unevenly, shardings, uneven_piece
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout


class PlacedColumns:
    """The columns of this rank's shards. Steps stay on their ranks; only products with the window are summed."""

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor], ranks: Ranks):
        self._shardings = list(shardings(named).values())
        self.ranks = ranks
        self.tensors = tuple(named.values())
        pieces = {name: local(tensor) for name, tensor in named.items()}
        kept = {}
        for (name, tensor), sharding in zip(named.items(), self._shardings, strict=True):
            if name in masks and sharding.dim != 0:
                raise ValueError(
                    f"masks: {name} is sharded along dimension {sharding.dim}, and masks need Shard(0), as fully_shard "
                    "makes it"
                )
            if name in masks:
                kept[name] = piece_of(name, masks[name], tensor, sharding)
        self._masked = set(kept)
        self.layout = ParameterLayout.of_tensors(pieces, kept, complete=False)
        self.spans = self.layout.slots
        self.dim = max(self.layout.dim, 1)
        self._before: list[int] | None = None  # kept weights of each parameter on the ranks before this one
        self._totals: list[int] = []

    def meet(self) -> None:
        if self._masked:
            sizes = torch.tensor([self.layout.sizes], device=self.layout.device)
            counts = self.ranks.gather(sizes, [1] * self.ranks.size)
            self._before, self._totals = counts[: self.ranks.rank].sum(0).tolist(), counts.sum(0).tolist()

    def place(self, number: int) -> tuple[int, int]:
        sharding, shape = self._shardings[number], self.tensors[number].shape
        if sharding.dim != 0:
            raise ValueError(
                f"{self.layout.names[number]} is sharded along dimension {sharding.dim}, so its columns are not "
                "contiguous in a compressed window that one process saved; load it on ranks like those that saved it"
            )
        start = sharding.span(shape[0]).start * shape[1:].numel() if self._before is None else self._before[number]
        return start, start + self.layout.sizes[number]

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        out[self.layout.dim :] = 0
        self.layout.flatten([None if value is None else local(value) for value in values], out=out[: self.layout.dim])

    def finish(self, step: Float[Tensor, " d"], sums: Float[Tensor, " n"]) -> tuple[list[Tensor], Float[Tensor, " n"]]:
        return list(self.layout.unflatten(step[: self.layout.dim]).values()), sums

    def total(self, sums: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return self.ranks.sum_(sums.clone())

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        sharding, tensor = self._shardings[number], self.tensors[number]
        if self.layout.names[number] in self._masked:
            start, total = self.place(number)[0], self._totals[number]
            return sharded_unevenly(rows, sharding.mesh, sharding.mesh_dim, start, total)
        piece = rows.view(len(rows), *local(tensor).shape)
        return sharded(piece, sharding.mesh, sharding.mesh_dim, sharding.dim + 1, (len(rows), *tensor.shape))

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        rows, sharding, tensor = state["rows"], self._shardings[number], self.tensors[number]
        if self.layout.names[number] in self._masked:
            return uneven_piece(rows) if is_placed(rows) else rows[:, slice(*self.place(number))]
        if not is_placed(rows):
            span = sharding.span(tensor.shape[sharding.dim])
            return rows.narrow(sharding.dim + 1, span.start, span.stop - span.start).flatten(1)
        piece = local(rows)
        if piece.shape[1:] != local(tensor).shape:
            raise ValueError(
                f"the saved state of {self.layout.names[number]} is sharded for other ranks; save and load it with "
                "torch.distributed.checkpoint"
            )
        return piece.flatten(1)

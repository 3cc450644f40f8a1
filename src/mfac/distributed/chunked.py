"""Columns of parameters that every rank has in full, as in data-parallel training: each rank holds a chunk of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.columns import Columns, is_placed, local
from mfac.distributed.placed import Sharding, sharded
from mfac.inverse_fisher import Ranks


class ChunkedColumns(Columns):
    """One chunk of every parameter. The step is gathered, so every rank moves its weights by the same numbers.

    Chunks are those of `torch.chunk` along the first dimension, or over the kept weights where there is a mask, so
    that `torch.distributed.checkpoint` can reshard them. Every rank has as many columns as the first; those past the
    end of a parameter are zero.
    """

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor], ranks: Ranks):
        super().__init__(named, masks)
        self._ranks = ranks
        self._chunks, self._slots, self.dim = list[slice](), list[slice](), 0
        for number, size in enumerate(self.layout.sizes):
            n = self._state_shape(number)[0]
            width = -(-n // ranks.size) * (size // max(n, 1))
            start = min(ranks.rank * width, size)
            self._chunks.append(slice(start, min(start + width, size)))  # of the parameter
            self._slots.append(slice(self.dim, self.dim + width))  # of the row, zeros at the end included
            self.dim += width
        pairs = zip(self._slots, self._chunks, strict=True)
        self.spans = tuple(slice(slot.start, slot.start + chunk.stop - chunk.start) for slot, chunk in pairs)
        self._sharding: Sharding | None = None

    def place(self, number: int) -> tuple[int, int]:
        return self._chunks[number].start, self._chunks[number].stop

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        out.zero_()
        for number, value in enumerate(values):
            if value is not None:
                flat, kept, chunk = value.reshape(-1), self.layout.kept[number], self._chunks[number]
                out[self.spans[number]] = flat[chunk] if kept is None else flat.index_select(0, kept[chunk])

    def finish(self, step: Float[Tensor, " d"], sums: Float[Tensor, " n"]) -> tuple[list[Tensor], Float[Tensor, " n"]]:
        everything = self._ranks.gather(torch.cat((step, sums.to(step))))
        sizes = zip(self._slots, self.layout.sizes, strict=True)
        row = torch.cat([everything[:, slot].reshape(-1)[:size] for slot, size in sizes])
        return list(self.layout.unflatten(row).values()), everything[:, self.dim :].sum(0)

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        if self._sharding is None:
            from torch.distributed.device_mesh import DeviceMesh

            assert self._ranks.group is not None
            self._sharding = Sharding(DeviceMesh.from_group(self._ranks.group, rows.device.type), 0, 0)
        n, *rest = self._state_shape(number)
        unit = max(self.layout.sizes[number] // max(n, 1), 1)
        return sharded(rows.view(len(rows), rows.shape[1] // unit, *rest), self._sharding, (n, *rest))

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        rows, chunk = state["rows"], self._chunks[number]
        if not is_placed(rows):
            return rows.flatten(1)[:, chunk]
        piece = local(rows).flatten(1)
        if piece.shape[1] != chunk.stop - chunk.start:
            raise ValueError(
                f"the saved state of {self.layout.names[number]} is sharded for other ranks: it has {piece.shape[1]} "
                f"columns here, not {chunk.stop - chunk.start}; save and load it with torch.distributed.checkpoint"
            )
        return piece

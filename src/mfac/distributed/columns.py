"""Columns that several ranks share: of parameters that every rank has in full (DDP), or of DTensors (FSDP2)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.columns import Columns, is_placed, local
from mfac.inverse_fisher import Ranks
from mfac.layout import Named, ParameterLayout


class ChunkedColumns(Columns):
    """One chunk of every parameter. The step is gathered, so every rank moves its weights by the same numbers.

    Chunks are those of `torch.chunk` along the first dimension, or over the kept weights where there is a mask, so
    that `torch.distributed.checkpoint` can reshard them. Every rank has as many columns as the first; those past the
    end of a parameter are zero.
    """

    def __init__(self, named: Named, masks: Named, ranks: Ranks):
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
        everything = self._ranks.gather(torch.cat((step, sums.double().view(step.dtype))))
        sizes = zip(self._slots, self.layout.sizes, strict=True)
        row = torch.cat([everything[:, slot].reshape(-1)[:size] for slot, size in sizes])
        sums = everything[:, self.dim :].contiguous().view(torch.float64).sum(0)
        return list(self.layout.unflatten(row).values()), sums

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


class PlacedColumns(Columns):
    """The columns of this rank's shards. Steps stay on their ranks; only products with the window are summed."""

    def __init__(self, named: Named, masks: Named, ranks: Ranks):
        self._shardings, self._ranks = shardings(named), ranks
        for name, sharding in zip(named, self._shardings, strict=True):
            if name in masks and sharding.dim != 0:
                raise ValueError(f"masks: {name} is sharded along dimension {sharding.dim}, and masks need Shard(0)")
        placed = {name: placed_like(name, mask, named[name], torch.bool) for name, mask in masks.items()}
        pieces, kept = ({name: local(tensor) for name, tensor in each.items()} for each in (named, placed))
        super().__init__(named, placed, ParameterLayout.of_tensors(pieces, kept, complete=False))
        self._before, self._totals = list[int](), list[int]()  # kept weights on the ranks before this one, and on all

    def meet(self) -> None:
        if self.masks:
            counts = self._ranks.gather(torch.tensor(self.layout.sizes, device=self.layout.device))
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
            return rows.to_local().local_shards()[0] if is_placed(rows) else rows[:, slice(*self.place(number))]
        piece = local(rows) if is_placed(rows) else sharding.piece(rows, sharding.dim + 1)
        if piece.shape[1:] != local(self.tensors[number]).shape:
            raise ValueError(f"the saved state of {name} is sharded for other ranks; use torch.distributed.checkpoint")
        return piece.flatten(1)


class Sharding(NamedTuple):
    """How a DTensor is divided: along `dim` of the tensor, over `mesh_dim` of its mesh."""

    mesh: Any
    mesh_dim: int
    dim: int

    def span(self, size: int) -> slice:
        """This rank's indices of a dimension of that size."""
        length = -(-size // self.mesh.size(self.mesh_dim))
        start = min(self.mesh.get_local_rank(self.mesh_dim) * length, size)
        return slice(start, min(start + length, size))

    def piece(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's piece of a whole tensor along that dimension."""
        span = self.span(whole.shape[dim])
        return whole.narrow(dim, span.start, span.stop - span.start)


def sharding_of(name: str, tensor: Any) -> Sharding:
    """How a parameter is sharded; ValueError unless it is `Shard` over exactly one dimension of its mesh."""
    from torch.distributed.tensor import Shard

    if not is_placed(tensor):
        raise ValueError(
            f"{name} is a plain tensor and other parameters are DTensors; call fully_shard on the whole model, or "
            "leave the parameter out of the optimizer"
        )
    shards = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(shards) != 1 or type(shards[0][1]) is not Shard:
        raise ValueError(
            f"{name} has the placements {tuple(tensor.placements)}; a window needs parameters that are Shard over one "
            "dimension of their mesh and Replicate over the others, as fully_shard makes them"
        )
    return Sharding(tensor.device_mesh, shards[0][0], shards[0][1].dim)


def shardings(named: Named) -> list[Sharding]:
    """How each parameter is sharded; ValueError unless all of them are, over the same ranks."""
    found = [sharding_of(name, tensor) for name, tensor in named.items()]
    for name, sharding in zip(named, found, strict=True):
        if sharding[:2] != found[0][:2]:
            raise ValueError(
                f"{name} is on the mesh {sharding.mesh} and the first parameter on {found[0].mesh}; one window needs "
                "all of its parameters on one mesh"
            )
    return found


def placed_like(name: str, value: Any, parameter: Any, dtype: torch.dtype) -> Tensor:
    """A copy of a value, whole or sharded as the parameter is, in `dtype`, with the placements of the parameter."""
    if not is_placed(value):
        sharding = sharding_of(name, parameter)
        piece = sharding.piece(value, sharding.dim)
    elif value.placements == parameter.placements and value.device_mesh == parameter.device_mesh:
        piece = local(value)
    else:
        raise ValueError(
            f"{name} has the placements {parameter.placements}, but its value {value.placements}; redistribute it, or "
            "save and load with torch.distributed.checkpoint"
        )
    copied = torch.zeros_like(parameter, dtype=dtype)
    local(copied).copy_(piece)
    return copied


@torch.no_grad()
def sharded(piece: Tensor, sharding: Sharding, shape: Sequence[int]) -> Tensor:
    """Rows [m, *shape] as a DTensor, of which this rank's piece is `piece`, in its own memory."""
    # A DTensor made from a view at an offset can be neither copied nor pickled. So it is made from an empty tensor
    # that is pointed at the piece afterwards: without autograd, `to_local` returns the local tensor itself.
    made = _as_rows(piece.new_empty(0), sharding, (len(piece), *shape))
    local(made).set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
    return made


def sharded_unevenly(piece: Tensor, sharding: Sharding, offset: int, total: int) -> Tensor:
    """A DTensor [m, total] of which this rank has the columns from `offset` on, however many other ranks have.

    `torch.distributed.checkpoint` can reshard it; nothing can be computed with it.
    """
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper  # torch has no public class for this

    return _as_rows(LocalShardsWrapper([piece], [(0, offset)]), sharding, (len(piece), total))


def _as_rows(piece: Tensor, sharding: Sharding, shape: Sequence[int]) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, size = sharding.mesh, torch.Size(shape)
    placements = [Shard(sharding.dim + 1) if i == sharding.mesh_dim else Replicate() for i in range(mesh.ndim)]
    stride = torch.empty(size, device="meta").stride()
    made: Tensor = DTensor.from_local(piece, mesh, placements, run_check=False, shape=size, stride=stride)
    return made

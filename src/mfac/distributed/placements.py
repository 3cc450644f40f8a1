"""DTensors as `fully_shard` makes them: which piece a rank has, and tensors that are sharded the same way."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfac.columns import is_placed, local


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


def sharding_of(name: str, tensor: Tensor) -> Sharding:
    """How a parameter is sharded; ValueError unless it is `Shard` over exactly one dimension of its mesh."""
    from torch.distributed.tensor import Shard

    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    shards = [(i, placement) for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(shards) != 1 or type(shards[0][1]) is not Shard:
        raise ValueError(
            f"{name} has the placements {tuple(placements)}; a window needs parameters that are Shard over one "
            "dimension of their mesh and Replicate over the others, as fully_shard makes them"
        )
    return Sharding(tensor.device_mesh, shards[0][0], shards[0][1].dim)  # type: ignore[attr-defined]


def shardings(named: Mapping[str, Tensor]) -> dict[str, Sharding]:
    """How each parameter is sharded; ValueError unless all of them are, over the same ranks."""
    for name, tensor in named.items():
        if not is_placed(tensor):
            raise ValueError(
                f"{name} is a plain tensor and other parameters are DTensors; call fully_shard on the whole model, or "
                "leave the parameter out of the optimizer"
            )
    found = {name: sharding_of(name, tensor) for name, tensor in named.items()}
    first = next(iter(found.values()))
    for name, sharding in found.items():
        if sharding[:2] != first[:2]:
            raise ValueError(
                f"{name} is on the mesh {sharding.mesh} and the first parameter on {first.mesh}; one window needs all "
                "of its parameters on one mesh"
            )
    return found


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Raises RuntimeError if a gradient has other placements than its parameter."""
    theirs, ours = gradient.placements, parameter.placements  # type: ignore[attr-defined]
    if theirs != ours:
        raise RuntimeError(
            f"a gradient has the placements {theirs} and its parameter {ours}; redistribute it to the parameter's "
            "placements first"
        )


def piece_of(name: str, value: Tensor, parameter: Tensor, sharding: Sharding) -> Tensor:
    """This rank's piece of a value, which is whole or sharded as the parameter is."""
    if value.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {list(parameter.shape)}, but its value {list(value.shape)}")
    if not is_placed(value):
        span = sharding.span(parameter.shape[sharding.dim])
        return value.narrow(sharding.dim, span.start, span.stop - span.start)
    theirs, ours = value.placements, parameter.placements  # type: ignore[attr-defined]
    if theirs != ours or value.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} has the placements {ours}, but its value {theirs}; redistribute it, or save and load with "
            "torch.distributed.checkpoint"
        )
    return local(value)


def placed_like(name: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a value, in `dtype`, with the placements of the parameter."""
    copied = torch.zeros_like(parameter, dtype=dtype)
    local(copied).copy_(piece_of(name, value, parameter, sharding_of(name, parameter)))
    return copied


@torch.no_grad()
def sharded(piece: Tensor, mesh: Any, mesh_dim: int, dim: int, shape: Sequence[int]) -> Tensor:
    """A DTensor of that shape, sharded along `dim`, of which this rank's piece is `piece`, in its own memory."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    # A DTensor made from a view at an offset can be neither copied nor pickled. So it is made from an empty tensor
    # that is pointed at the piece afterwards: without autograd, `to_local` returns the local tensor itself.
    empty, size = piece.new_empty(0), torch.Size(shape)
    made = DTensor.from_local(empty, mesh, _placements(mesh, mesh_dim, dim), run_check=False, shape=size, stride=stride)
    made.to_local().set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
    result: Tensor = made
    return result


def sharded_unevenly(piece: Tensor, mesh: Any, mesh_dim: int, offset: int, total: int) -> Tensor:
    """A DTensor [m, total] of which this rank has the columns from `offset` on, however many other ranks have.

    `torch.distributed.checkpoint` can reshard it; nothing can be computed with it.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper  # torch has no public class for this

    shards, size = LocalShardsWrapper([piece], [(0, offset)]), torch.Size((len(piece), total))
    placements = _placements(mesh, mesh_dim, 1)
    result: Tensor = DTensor.from_local(shards, mesh, placements, run_check=False, shape=size, stride=(total, 1))
    return result


@torch.no_grad()
def uneven_piece(placed: Tensor) -> Tensor:
    """This rank's columns of what `sharded_unevenly` made."""
    piece: Tensor = local(placed).local_shards()[0]  # type: ignore[attr-defined]
    return piece


def _placements(mesh: Any, mesh_dim: int, dim: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(dim) if i == mesh_dim else Replicate() for i in range(mesh.ndim)]

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

    def piece(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's piece of a whole tensor along that dimension."""
        span = self.span(whole.shape[dim])
        return whole.narrow(dim, span.start, span.stop - span.start)

    def of_rows(self) -> list[Any]:
        """The placements of rows [m, *shape] that are divided as the parameter is."""
        from torch.distributed.tensor import Replicate, Shard

        return [Shard(self.dim + 1) if i == self.mesh_dim else Replicate() for i in range(self.mesh.ndim)]


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


def shardings(named: Mapping[str, Tensor]) -> list[Sharding]:
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
    if value.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {list(parameter.shape)}, but its value {list(value.shape)}")
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
    from torch.distributed.tensor import DTensor

    size = torch.Size((len(piece), *shape))
    stride = torch.empty(size, device="meta").stride()
    # A DTensor made from a view at an offset can be neither copied nor pickled. So it is made from an empty tensor
    # that is pointed at the piece afterwards: without autograd, `to_local` returns the local tensor itself.
    made: Tensor = DTensor.from_local(
        piece.new_empty(0), sharding.mesh, sharding.of_rows(), run_check=False, shape=size, stride=stride
    )
    local(made).set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
    return made


def sharded_unevenly(piece: Tensor, sharding: Sharding, offset: int, total: int) -> Tensor:
    """A DTensor [m, total] of which this rank has the columns from `offset` on, however many other ranks have.

    `torch.distributed.checkpoint` can reshard it; nothing can be computed with it.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper  # torch has no public class for this

    shards, size = LocalShardsWrapper([piece], [(0, offset)]), torch.Size((len(piece), total))
    options: dict[str, Any] = {"run_check": False, "shape": size, "stride": (total, 1)}
    made: Tensor = DTensor.from_local(shards, sharding.mesh, sharding.of_rows(), **options)
    return made


@torch.no_grad()
def uneven_piece(placed: Tensor) -> Tensor:
    """This rank's columns of what `sharded_unevenly` made."""
    piece: Tensor = local(placed).local_shards()[0]  # type: ignore[attr-defined]
    return piece

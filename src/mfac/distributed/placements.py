"""Parameters that are DTensors, as `fully_shard` makes them: which piece a rank has, and tensors that are cut alike."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_placed(tensor: Tensor) -> bool:
    """Whether it is a DTensor; torch.distributed.tensor is slow to import, and nobody has one before it is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, in its own memory; any other tensor as it is."""
    piece: Tensor = tensor.to_local() if is_placed(tensor) else tensor  # type: ignore[attr-defined]
    return piece


def local_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's pieces of parameters that are all DTensors; as they are where none is."""
    return [local(tensor) for tensor in tensors] if tensors and is_placed(tensors[0]) else list(tensors)


def local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's pieces of the gradients of parameters, which have one.

    Raises:
        RuntimeError: a gradient is laid out otherwise than its parameter.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or not is_placed(gradients[0]):
        return gradients
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"a gradient is laid out as {gradient.placements} and its parameter as "  # type: ignore[attr-defined]
                f"{parameter.placements}; redistribute it to the parameter's placements first"  # type: ignore[attr-defined]
            )
    return [local(gradient) for gradient in gradients]


class Cut(NamedTuple):
    """How a DTensor is cut: along `dim` of the tensor, over `mesh_dim` of its mesh."""

    mesh: Any
    mesh_dim: int
    dim: int

    def span(self, size: int) -> slice:
        """The indices of a dimension of that size which this rank has."""
        length = -(-size // self.mesh.size(self.mesh_dim))
        start = min(self.mesh.get_local_rank(self.mesh_dim) * length, size)
        return slice(start, min(start + length, size))


def cut_of(name: str, tensor: Tensor) -> Cut:
    """How a parameter is cut.

    Raises:
        ValueError: it is laid out in another way than `Shard` over one dimension of its mesh.
    """
    from torch.distributed.tensor import Shard

    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    cuts = [(i, placement) for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cuts) != 1 or type(cuts[0][1]) is not Shard:
        raise ValueError(
            f"{name} is laid out as {tuple(placements)}, and a window can only be cut along parameters that are Shard "
            "over one dimension of their mesh (Replicate over others), which fully_shard makes of every parameter"
        )
    return Cut(tensor.device_mesh, cuts[0][0], cuts[0][1].dim)  # type: ignore[attr-defined]


def common_cut(named: Mapping[str, Tensor]) -> dict[str, Cut]:
    """How each parameter is cut, all of them over the same ranks.

    Raises:
        ValueError: some parameter is no DTensor, is laid out otherwise, or is on other ranks than the first.
    """
    plain = [name for name, tensor in named.items() if not is_placed(tensor)]
    if plain:
        raise ValueError(
            f"{plain[0]} is a plain tensor and other parameters are DTensors; call fully_shard on the whole model, or "
            "leave the parameter out of the optimizer"
        )
    cuts = {name: cut_of(name, tensor) for name, tensor in named.items()}
    first = next(iter(cuts.values()))
    for name, cut in cuts.items():
        if (cut.mesh, cut.mesh_dim) != (first.mesh, first.mesh_dim):
            raise ValueError(
                f"{name} is on the mesh {cut.mesh} and the first parameter on {first.mesh}; one window needs all of "
                "its parameters on one mesh"
            )
    return cuts


def piece_of(name: str, value: Tensor, parameter: Tensor, cut: Cut) -> Tensor:
    """This rank's piece of a value of a parameter's shape, which is whole or cut as the parameter is.

    Raises:
        ValueError: it has another shape, or is cut in another way.
    """
    if value.shape != parameter.shape:
        raise ValueError(f"{name} is {list(parameter.shape)}, and what belongs to it {list(value.shape)}")
    if not is_placed(value):
        return value.movedim(cut.dim, 0)[cut.span(parameter.shape[cut.dim])].movedim(0, cut.dim)
    if value.placements != parameter.placements or value.device_mesh != parameter.device_mesh:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} is laid out as {parameter.placements}, and what belongs to it as "  # type: ignore[attr-defined]
            f"{value.placements}; lay it out alike, or save and load with torch.distributed.checkpoint"  # type: ignore[attr-defined]
        )
    return local(value)


def like(name: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a saved value, in `dtype`, laid out as the parameter is.

    Raises:
        ValueError: it is cut over ranks in another way.
    """
    if is_placed(parameter):
        copied = torch.zeros_like(parameter, dtype=dtype)
        local(copied).copy_(piece_of(name, value, parameter, cut_of(name, parameter)))
        return copied
    return uncut(name, value).to(parameter.device, dtype, copy=True)


def uncut(name: str, value: Tensor) -> Tensor:
    """A saved value as a plain tensor.

    Raises:
        ValueError: it is a DTensor that is cut over several ranks.
    """
    if is_placed(value) and value.device_mesh.size() > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"the saved state of {name} is cut over {value.device_mesh.size()} ranks; "  # type: ignore[attr-defined]
            "save and load it with torch.distributed.checkpoint, which cuts it anew"
        )
    return local(value)


def as_placed(piece: Tensor, mesh: Any, mesh_dim: int, dim: int, shape: Sequence[int]) -> Tensor:
    """A DTensor of that shape, cut along `dim`, of which this rank's piece is `piece`, in its own memory."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Shard(dim) if i == mesh_dim else Replicate() for i in range(mesh.ndim)]
    stride = torch.empty(tuple(shape), device="meta").stride()
    # One that begins elsewhere than its storage cannot be copied or pickled: so it begins with nothing.
    empty = piece.new_empty(0)
    placed = DTensor.from_local(empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    placed._local_tensor = piece
    result: Tensor = placed
    return result


def as_uneven(piece: Tensor, mesh: Any, mesh_dim: int, offset: int, total: int) -> Tensor:
    """A DTensor [m, total] of which this rank has the columns from `offset` on, however many others have.

    `torch.distributed.checkpoint` can cut it anew; nothing can be computed with it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    placements = [Shard(1) if i == mesh_dim else Replicate() for i in range(mesh.ndim)]
    shards = LocalShardsWrapper([piece], [(0, offset)])
    shape = torch.Size((len(piece), total))
    result: Tensor = DTensor.from_local(shards, mesh, placements, run_check=False, shape=shape, stride=(total, 1))
    return result


def uneven_piece(placed: Tensor) -> Tensor:
    """This rank's columns of what `as_uneven` made."""
    piece: Tensor = placed._local_tensor.local_shards()[0]  # type: ignore[attr-defined]
    return piece

"""Which columns a process is to hold, and whether all ranks mean the same window."""

import hashlib
from collections.abc import Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from mfac.distributed.chunked import ChunkedColumns
from mfac.distributed.columns import Columns
from mfac.distributed.groups import Ranks
from mfac.distributed.placed import PlacedColumns
from mfac.distributed.placements import common_cut, is_placed
from mfac.distributed.whole import WholeColumns


def columns_of(named: Mapping[str, Tensor], masks: Mapping[str, Tensor], process_group: ProcessGroup | None) -> Columns:
    """The columns of this process for these parameters.

    Raises:
        ValueError: parameters that cannot be cut, a group beside DTensors, or masks that do not fit.
    """
    ranks = ranks_of(named, process_group)
    if any(is_placed(tensor) for tensor in named.values()):
        return PlacedColumns(named, masks, ranks)
    return WholeColumns(named, masks) if ranks.size == 1 else ChunkedColumns(named, masks, ranks)


def ranks_of(named: Mapping[str, Tensor], process_group: ProcessGroup | None) -> Ranks:
    """Who shares the columns: the group, or the mesh of parameters that are DTensors.

    Raises:
        ValueError: there are both, or DTensors that cannot be cut.
    """
    if not any(is_placed(tensor) for tensor in named.values()):
        return Ranks(process_group)
    if process_group is not None:
        raise ValueError("DTensor parameters bring the ranks of their own mesh; leave process_group out")
    cut = next(iter(common_cut(named).values()))
    return Ranks(cut.mesh.get_group(cut.mesh_dim))


def agree_on(ranks: Ranks, named: Mapping[str, Tensor], masks: Mapping[str, Tensor], **options: object) -> None:
    """Makes sure that all ranks have the same parameters, masks and options.

    Raises:
        ValueError: some differ, on every rank alike; it names the first that does.
    """
    if ranks.size == 1:
        return
    ranks.agree("the options of the window", options)
    described = [_described(name, tensor, masks.get(name)) for name, tensor in named.items()]
    try:
        ranks.agree("the parameters", hashlib.sha256(repr(described).encode()).hexdigest())
    except ValueError:  # on all of them, so that all go on to find out which it is
        ranks.agree("the number of parameters", len(described))
        for number, one in enumerate(described):
            ranks.agree(f"parameter {number}", one)
        raise


def _described(name: str, tensor: Tensor, mask: Tensor | None) -> str:
    text = f"{name}: {list(tensor.shape)} {tensor.dtype}"
    if mask is None or is_placed(mask):  # of which every rank has its own piece
        return text
    kept = mask.flatten().nonzero()[:, 0].cpu()
    return f"{text}, {len(kept)} weights kept, with the sum {int((kept * 2654435761 % 4294967291).sum())}"

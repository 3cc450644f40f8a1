"""Model + loss + batches -> the diagonal blocks of GᵀG, without keeping the rows."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mfac.fisher_blocks import FisherBlocks
from mfac.gradients.batches import Batch
from mfac.gradients.collect import Collection, Fisher, Method
from mfac.gradients.losses import LossFn, OutputFn, SampleFn
from mfac.gradients.model_state import evaluation
from mfac.gradients.per_sample import STAGING_BYTES
from mfac.inverse_fisher import ranks_of
from mfac.layout import Masks, ParameterLayout, Params
from mfac.memory import available_memory, gib
from mfac.pages import block_runs

ROWS_AT_ONCE = 32  # are summed together: a product of matrices is faster than one row after the other


def accumulate_fisher(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], num_grads: int, block_size: int, *,
    params: Params = None, per_sample: bool = False, fisher: Fisher = "empirical", masks: Masks = None,
    device: torch.device | str | None = None, cycle: bool = False, progress: bool | None = None,
    sample_fn: SampleFn | None = None, output_fn: OutputFn | None = None, method: Method = "auto",
    chunk_size: int | None = None, seed: int = 0, process_group: dist.ProcessGroup | None = None,
) -> FisherBlocks:  # fmt: skip
    """The diagonal blocks of GᵀG, summed as the gradients come: memory O(block_size · d), however large m is.

    Blocks never straddle two parameters. Arguments and errors are those of `collect_gradients`; with a `process_group`
    each rank has the blocks of its share of the columns, over the rows of all ranks.
    """
    ranks = ranks_of(process_group)
    with ranks.together("checking the arguments"):
        layout = ParameterLayout(model, params, masks)
        collection = Collection(model, loss_fn, layout, num_grads, per_sample, fisher, method, chunk_size, cycle,
                                progress, seed, sample_fn, output_fn)  # fmt: skip
    where = collection.device if device is None else torch.device(device)
    if ranks.size > 1:
        from mfac.distributed.exchange import agreed_exchange

        return agreed_exchange(collection, batches, ranks, block_size).blocks(block_size, where)
    return sum_blocks(collection, batches, block_size, where)


def new_blocks(sizes: Sequence[int], block_size: int, device: torch.device) -> FisherBlocks:
    """Blocks of zeros over tensors of these lengths; MemoryError if they would not fit."""
    sizes = [size for size in sizes if size]
    dim = sum(sizes)
    needed = 8 * sum(run.count * run.length**2 for run in block_runs(dim, block_size, sizes))
    available = available_memory(device)
    if available is not None and needed > available:
        raise MemoryError(
            f"blocks of {block_size} over {dim} weights need {gib(needed)}, and {device} has {gib(available)} "
            f"available; what would fit: block_size={max(1, block_size * available // needed)}, or fewer params"
        )
    return FisherBlocks(dim, block_size, sizes, device=device)


def sum_blocks(collection: Collection, batches: Iterable[Batch], block_size: int, device: torch.device) -> FisherBlocks:
    """The blocks of all rows, which are added some at a time."""
    layout = collection.layout
    blocks = new_blocks(layout.sizes, block_size, device)
    count = max(1, min(ROWS_AT_ONCE, STAGING_BYTES // max(1, layout.dim * layout.dtype.itemsize)))
    with evaluation(collection.model, layout.tensors):
        for rows in collection.pieces(collection.stream(batches), count):
            blocks.add(rows)
    return blocks

"""Model + loss + batches -> rows of G: in memory, in a file, or summed into blocks of the Fisher matrix."""

import os
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.gradients.batches import ALIGNMENT, Batch, passes
from mfac.gradients.collection import Collection
from mfac.gradients.losses import LossFn, OutputFn, SampleFn
from mfac.gradients.model_state import evaluation
from mfac.gradients.sinks import collect_to_file, new_blocks, sum_blocks
from mfac.inverse_fisher import ranks_of
from mfac.layout import Masks, ParameterLayout, Params
from mfac.memory import available_memory, gib

Fisher = Literal["empirical", "sampled"]
Method = Literal["auto", "vmap", "loop"]


def collect_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    num_grads: int,
    *,
    params: Params = None,
    per_sample: bool = False,
    fisher: Fisher = "empirical",
    masks: Masks = None,
    out: str | os.PathLike[str] | None = None,
    window: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    cycle: bool = False,
    progress: bool | None = None,
    sample_fn: SampleFn | None = None,
    output_fn: OutputFn | None = None,
    method: Method = "auto",
    chunk_size: int | None = None,
    seed: int = 0,
    block_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "m d"] | GradientFile:
    """The rows of G: the gradients of `num_grads` batches or samples, taken in eval mode.

    The model is left as it was found (training flags, `.grad`, buffers), and so is the random state.

    With a `process_group` its ranks make the rows together, each from batches of its own, and each keeps its columns of
    all rows, as `column_shares` divides them. Row i is made by rank i modulo their number. If one rank fails, all do.

    Args:
        model: any module.
        loss_fn: (model, batch) -> scalar; `criterion_loss` and `model_loss` are ready ones.
        batches: any iterable of tensors, tuples, dicts or encodings; moved to the model's device.
        num_grads: m, the number of rows.
        params: names, "re:..." patterns or tensors; None: every trainable parameter.
        per_sample: one row per sample instead of one per batch; the loss is given batches of one.
        fisher: "empirical" uses the labels of the data, "sampled" draws them from the model's output.
        masks: {name or parameter: bool tensor}; only coordinates that are True are in a row.
        out: a file for the rows, written as they come; if it exists, the run is resumed where it stopped.
        window: the dtype of the rows in the file; the same as `dtype`.
        dtype: of the rows; None: that of the parameters.
        device: of the rows; None: that of the parameters.
        cycle: start `batches` again when they run out.
        progress: True shows a bar, False does not, None does on a terminal.
        sample_fn: (model, batch) -> the batch with labels drawn from the model's output, for "sampled".
        output_fn: (model, batch) -> logits [samples, classes, ...], for "sampled" with cross-entropy.
        method: how samples become rows: "vmap", "loop", or "auto", which maps where it can; the same rows up to
            rounding.
        chunk_size: samples mapped at once; None: as many as fit a fixed amount of memory.
        seed: of drawn labels, and of what the loss itself draws.
        block_size: with a group, the size of the blocks of F; all columns of a block are on one rank. None: the full
            matrix.
        process_group: the ranks that make the rows together, each with the same model; not with `out`.

    Returns:
        A tensor [num_grads, d], d in the order of `model.named_parameters()`; with `out`, a `GradientFile`; with a
        group, this rank's columns of the tensor.

    Raises:
        ValueError: an argument that does not fit, too few batches, or a file made with other arguments.
        MemoryError: the rows would not fit; the message says what would.
        RuntimeError: a loss or a gradient that is not finite.
    """
    ranks = ranks_of(process_group)
    with ranks.together("checking the arguments"):
        layout = ParameterLayout(model, params, masks)
        collection = Collection(model, loss_fn, layout, num_grads, per_sample, fisher, method, chunk_size, cycle,
                                progress, seed, sample_fn, output_fn)  # fmt: skip
        row_dtype = _row_dtype(collection.layout, dtype, window, out)
        if out is not None and ranks.size > 1:
            raise ValueError("out= is for one process; with a process_group every rank keeps its columns in memory")
        if out is not None and device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"rows with out= are on disk, so device={str(device)!r} has no meaning; leave it out")
    where = collection.device if device is None else torch.device(device)
    if ranks.size > 1:
        from mfac.distributed.exchange import check_ranks, collect_share
        from mfac.distributed.shares import column_shares

        check_ranks(ranks, collection, {"dtype": row_dtype, "block_size": block_size})
        shares = column_shares(collection.layout.sizes, ranks.size, block_size)
        return collect_share(collection, batches, shares, ranks, row_dtype, where)
    if out is not None:
        return collect_to_file(collection, batches, out, row_dtype)
    grads = new_rows(num_grads, collection.layout.dim, row_dtype, where)
    with evaluation(model):
        for chunk in collection.chunks(passes(batches, cycle)):
            collection.fill(chunk, grads[chunk.row : chunk.row + chunk.count], zeroed=True)
    return grads


def accumulate_fisher(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    num_grads: int,
    block_size: int,
    *,
    params: Params = None,
    per_sample: bool = False,
    fisher: Fisher = "empirical",
    masks: Masks = None,
    device: torch.device | str | None = None,
    cycle: bool = False,
    progress: bool | None = None,
    sample_fn: SampleFn | None = None,
    output_fn: OutputFn | None = None,
    method: Method = "auto",
    chunk_size: int | None = None,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> FisherBlocks:
    """The diagonal blocks of GᵀG, summed as the gradients come: memory O(block_size · d), however large m is.

    Blocks never straddle two parameters. The arguments are those of `collect_gradients`; with a `process_group` each
    rank has the blocks of its share of the columns, over the rows of all ranks.

    Raises:
        ValueError, MemoryError, RuntimeError: as `collect_gradients` does.
    """
    ranks = ranks_of(process_group)
    with ranks.together("checking the arguments"):
        layout = ParameterLayout(model, params, masks)
        collection = Collection(model, loss_fn, layout, num_grads, per_sample, fisher, method, chunk_size, cycle,
                                progress, seed, sample_fn, output_fn)  # fmt: skip
    where = collection.device if device is None else torch.device(device)
    if ranks.size > 1:
        from mfac.distributed.exchange import accumulate_share, check_ranks
        from mfac.distributed.shares import column_shares

        check_ranks(ranks, collection, {"block_size": block_size})
        shares = column_shares(collection.layout.sizes, ranks.size, block_size)
        return accumulate_share(collection, batches, shares, ranks, block_size, where)
    blocks = new_blocks(collection.layout.sizes, block_size, where)
    sum_blocks(collection, batches, blocks)
    return blocks


def new_rows(num_grads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "m d"]:
    """Zeros that the system hands out page by page when they are written to.

    The large parts of a row that stay zero (an embedding's) then cost nothing; `torch.zeros` writes them.

    Raises:
        MemoryError: they would not fit.
    """
    row = dim * dtype.itemsize
    needed, available = num_grads * row, available_memory(device)
    if available is not None and needed > available:
        ways = [f"num_grads={available // row}"] if available >= row else []
        if dtype.itemsize > 2 and num_grads * dim * 2 <= available:
            ways.append(f"dtype=torch.bfloat16 ({gib(num_grads * dim * 2)})")
        ways += ["out='gradients.rows' on disk", "blocks of the Fisher matrix by accumulate_fisher"]
        raise MemoryError(
            f"{num_grads} gradients of {dim} numbers in {dtype} need {gib(needed)}, and {device} has {gib(available)} "
            f"available; what would fit: {', '.join(ways)}"
        )
    with torch.inference_mode(False):
        if device.type != "cpu":
            return torch.zeros(num_grads, dim, dtype=dtype, device=device)
        raw = torch.from_numpy(np.zeros(needed + ALIGNMENT, np.uint8))
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + needed].view(dtype).view(num_grads, dim)


def _row_dtype(layout: ParameterLayout, dtype: torch.dtype | None, window: Any, out: object) -> torch.dtype:
    if window is not None and out is None:
        raise ValueError(f"window={window!r} is for rows in a file, and there is none; pass out=, or dtype= instead")
    if window is not None and dtype is not None:
        raise ValueError(f"window={window!r} and dtype={dtype!r} both say how rows are stored; pass one of them")
    chosen = window or dtype or layout.dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        name = "dtype" if window is None else "window"
        raise ValueError(
            f"rows are floating-point numbers, and {name} is {chosen!r}; use torch.float32 or torch.bfloat16"
        )
    return chosen

"""Model + loss + batches -> rows of G: in memory, on disk, or summed into blocks of the Fisher matrix."""

import os
from collections.abc import Iterable
from typing import Literal, overload

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from mfac.blocks import FisherBlocks, block_runs
from mfac.columns import ranks_of
from mfac.distributed.exchange import accumulate_share, check_ranks, collect_share
from mfac.distributed.shares import ColumnShare, column_shares
from mfac.gradient_file import GradientFile, check_file_dtype
from mfac.gradients import fingerprint
from mfac.gradients.batches import Batch
from mfac.gradients.collection import Collection, Filler
from mfac.gradients.fillers import Task
from mfac.gradients.losses import OutputFn, SampleFn
from mfac.gradients.one_batch import LossFn
from mfac.gradients.row_sinks import BlocksSink, FileSink, TensorSink
from mfac.layout import Masks, ParameterLayout, Params
from mfac.memory import available_memory, gib

Fisher = Literal["empirical", "sampled"]
Method = Literal["auto", "vmap", "loop"]


@overload
def collect_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    num_grads: int,
    *,
    params: Params = ...,
    per_sample: bool = ...,
    fisher: Fisher = ...,
    masks: Masks = ...,
    out: None = ...,
    window: None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
    cycle: bool = ...,
    progress: bool | None = ...,
    sample_fn: SampleFn | None = ...,
    output_fn: OutputFn | None = ...,
    method: Method = ...,
    chunk_size: int | None = ...,
    seed: int = ...,
    block_size: int | None = ...,
    process_group: dist.ProcessGroup | None = ...,
) -> Tensor: ...


@overload
def collect_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    num_grads: int,
    *,
    params: Params = ...,
    per_sample: bool = ...,
    fisher: Fisher = ...,
    masks: Masks = ...,
    out: str | os.PathLike[str],
    window: torch.dtype | None = ...,
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
    cycle: bool = ...,
    progress: bool | None = ...,
    sample_fn: SampleFn | None = ...,
    output_fn: OutputFn | None = ...,
    method: Method = ...,
    chunk_size: int | None = ...,
    seed: int = ...,
) -> GradientFile: ...


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

    The model is left as it was found: training flags, `.grad`, buffers; so is the random state.

    With a `process_group` the rows are made by all of its ranks, each from batches of its own, and each rank keeps
    some columns of all of them: those that `column_shares` gives it. Row i is made by rank i modulo their number. What
    fails on one rank fails on all.

    Args:
        model: any module.
        loss_fn: (model, batch) -> scalar; see `criterion_loss` and `model_loss` for ready ones.
        batches: any iterable of tensors, tuples, dicts or encodings; moved to the model's device.
        num_grads: m, the number of rows.
        params: names, "re:..." patterns or tensors; None: every trainable parameter.
        per_sample: one row a sample instead of one a batch; the loss is given batches of one.
        fisher: "empirical" takes the labels of the data, "sampled" draws them from the model's output.
        masks: {name or parameter: bool tensor}; only coordinates that are True are in a row.
        out: a file to write the rows to as they come; if it is there already, the run goes on where it stopped.
        window: the dtype in which the file stores rows; None: `dtype`.
        dtype: of the rows; None: that of the parameters.
        device: of the rows; None: that of the parameters.
        cycle: start `batches` again when they run out.
        progress: True shows a bar, False does not, None does on a terminal.
        sample_fn: (model, batch) -> the batch with labels drawn from the model's output, for "sampled".
        output_fn: (model, batch) -> logits [samples, classes, ...], for "sampled" with cross-entropy.
        method: how samples become rows, the same up to rounding; "auto" maps (vmap) where that is faster, which it
            measures where it is not clear (but not with `out`, nor when torch is to be deterministic).
        chunk_size: samples mapped at once; None: what fits a fixed amount of memory.
        seed: of the labels that are drawn, and of what the loss itself draws.
        block_size: with a group, of the blocks of F, each of which has all its columns on one rank; None: the full
            matrix, or one rank.
        process_group: whose ranks make the rows together, each with the same model; not with `out`.

    Returns:
        The tensor [num_grads, d], d in the order of `model.named_parameters()`; with `out`, the file; with a group,
        this rank's columns of it.

    Raises:
        ValueError: an argument that does not fit, too few batches, or a file made with other arguments.
        MemoryError: the rows would not fit; the message says what would.
        RuntimeError: a loss or a gradient that is not finite.
    """
    ranks = ranks_of(process_group)
    with ranks.together("looking at the arguments"):
        collection = Collection(num_grads, per_sample, fisher, method, chunk_size, cycle, progress, seed)
        task = collection.task(model, loss_fn, ParameterLayout(model, params, masks), sample_fn, output_fn)
        if window is not None:
            _check_window(window, out, dtype)
        dtype = task.layout.dtype if dtype is None else dtype
        if not dtype.is_floating_point:
            raise ValueError(
                f"rows are floating-point numbers, and dtype is {dtype}; use torch.float32 or torch.bfloat16"
            )
        if out is not None and ranks.size > 1:
            raise ValueError(
                "out= is for one process; with a process_group every rank keeps its columns in memory, fewer of them "
                "the more ranks there are"
            )
    layout = task.layout
    where = layout.device if device is None else torch.device(device)
    if ranks.size > 1:
        check_ranks(ranks, task, collection, {"dtype": dtype, "block_size": block_size})
        shares = column_shares(layout.sizes, ranks.size, block_size)
        return collect_share(collection, task, batches, shares, ranks, dtype, where)
    if out is not None:
        stored = check_file_dtype(dtype if window is None else window)
        return _collect_to_file(collection, task, batches, out, stored, device)
    sink = TensorSink(num_grads, layout.dim, dtype, where)
    collection.run(task, batches, lambda first_batch: (sink, collection.filler(task)))
    return sink.grads


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
    with ranks.together("looking at the arguments"):
        collection = Collection(num_grads, per_sample, fisher, method, chunk_size, cycle, progress, seed)
        task = collection.task(model, loss_fn, ParameterLayout(model, params, masks), sample_fn, output_fn)
        layout = task.layout
        where = layout.device if device is None else torch.device(device)
        shares = column_shares(layout.sizes, ranks.size, block_size)
        _check_blocks(shares[ranks.rank], block_size, where)
    if ranks.size > 1:
        check_ranks(ranks, task, collection, {"block_size": block_size})
        return accumulate_share(collection, task, batches, shares, ranks, block_size, where)
    sizes = shares[0].sizes
    with torch.inference_mode(False):
        sink = BlocksSink(FisherBlocks(layout.dim, block_size, sizes, device=where), layout.dtype, layout.device)
    collection.run(task, batches, lambda first_batch: (sink, collection.filler(task)))
    sink.flush()
    return sink.blocks


def _check_blocks(share: ColumnShare, block_size: int, device: torch.device) -> None:
    """Raises MemoryError where the blocks would not fit."""
    needed = 8 * sum(run.count * run.length**2 for run in block_runs(len(share), block_size, share.sizes))
    available = available_memory(device)
    if available is not None and needed > available:
        raise MemoryError(
            f"blocks of {block_size} over {len(share)} weights need {gib(needed)}, and {device} has {gib(available)} "
            f"available; what would fit: block_size={max(1, block_size * available // needed)}, or fewer params"
        )


def _check_window(window: torch.dtype, out: object, dtype: torch.dtype | None) -> None:
    """Raises ValueError where there is no file to be stored so, or two ways to do it."""
    check_file_dtype(window)
    if out is None:
        raise ValueError(
            f"window={window!r} says how a file stores rows, and there is none; pass out=..., or dtype= for rows in "
            "memory"
        )
    if dtype is not None:
        raise ValueError(f"window={window!r} and dtype={dtype!r} both say how rows are stored; pass one of them")


def _collect_to_file(
    collection: Collection,
    task: Task,
    batches: Iterable[Batch],
    out: str | os.PathLike[str],
    stored: torch.dtype,
    device: torch.device | str | None,
) -> GradientFile:
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"rows with out= are on disk, so device={str(device)!r} has no meaning; leave it out")
    sinks: list[FileSink] = []

    def begin(first_batch: Batch) -> tuple[FileSink, Filler]:
        entries = fingerprint.fields(task, collection, first_batch)
        sink = FileSink(out, collection.num_grads, task.layout.dim, stored)
        known = sink.file
        plan = None if known is None else fingerprint.check(known, entries, collection.num_grads, task, str(stored))
        filler = collection.resumable_filler(task, plan)
        sink.fingerprint = lambda: fingerprint.encode(entries, filler.plan)
        sinks.append(sink)
        return sink, filler

    collection.run(task, batches, begin)
    file = sinks[0].file
    assert file is not None
    return file

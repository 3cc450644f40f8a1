"""Model + loss + batches -> rows of G: in memory, on disk, or summed into blocks of the Fisher matrix."""

import os
from collections.abc import Iterable
from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.blocks import FisherBlocks, block_runs
from mfac.gradient_file import GradientFile
from mfac.gradients import fingerprint
from mfac.gradients.batches import Batch
from mfac.gradients.collection import Collection, Filler
from mfac.gradients.fillers import Task
from mfac.gradients.losses import OutputFn, SampleFn
from mfac.gradients.per_sample import LossFn
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
    dtype: torch.dtype | None = ...,
    device: torch.device | str | None = ...,
    cycle: bool = ...,
    progress: bool | None = ...,
    sample_fn: SampleFn | None = ...,
    output_fn: OutputFn | None = ...,
    method: Method = ...,
    chunk_size: int | None = ...,
    seed: int = ...,
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
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    cycle: bool = False,
    progress: bool | None = None,
    sample_fn: SampleFn | None = None,
    output_fn: OutputFn | None = None,
    method: Method = "auto",
    chunk_size: int | None = None,
    seed: int = 0,
) -> Float[Tensor, "m d"] | GradientFile:
    """The rows of G: the gradients of `num_grads` batches or samples, taken in eval mode.

    The model is left as it was found: training flags, `.grad`, buffers; so is the random state.

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

    Returns:
        The tensor [num_grads, d], d in the order of `model.named_parameters()`; with `out`, the file.

    Raises:
        ValueError: an argument that does not fit, too few batches, or a file made with other arguments.
        MemoryError: the rows would not fit; the message says what would.
        RuntimeError: a loss or a gradient that is not finite.
    """
    collection = Collection(num_grads, per_sample, fisher, method, chunk_size, cycle, progress, seed)
    task = collection.task(model, loss_fn, ParameterLayout(model, params, masks), sample_fn, output_fn)
    dtype = task.layout.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"rows are floating-point numbers, and dtype is {dtype}; use torch.float32 or torch.bfloat16")
    if out is not None:
        return _collect_to_file(collection, task, batches, out, dtype, device)
    sink = TensorSink(num_grads, task.layout.dim, dtype, task.layout.device if device is None else torch.device(device))
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
) -> FisherBlocks:
    """The diagonal blocks of GᵀG, summed as the gradients come: memory O(block_size · d), however large m is.

    Blocks never straddle two parameters. The arguments are those of `collect_gradients`.

    Raises:
        ValueError, MemoryError, RuntimeError: as `collect_gradients` does.
    """
    collection = Collection(num_grads, per_sample, fisher, method, chunk_size, cycle, progress, seed)
    task = collection.task(model, loss_fn, ParameterLayout(model, params, masks), sample_fn, output_fn)
    layout = task.layout
    where = layout.device if device is None else torch.device(device)
    sizes = [size for size in layout.sizes if size]
    needed = 8 * sum(run.count * run.length**2 for run in block_runs(layout.dim, block_size, sizes))
    available = available_memory(where)
    if available is not None and needed > available:
        raise MemoryError(
            f"blocks of {block_size} over {layout.dim} weights need {gib(needed)}, and {where} has {gib(available)} "
            f"available; what would fit: block_size={max(1, block_size * available // needed)}, or fewer params"
        )
    with torch.inference_mode(False):
        sink = BlocksSink(FisherBlocks(layout.dim, block_size, sizes, device=where), layout.dtype, layout.device)
    collection.run(task, batches, lambda first_batch: (sink, collection.filler(task)))
    sink.flush()
    return sink.blocks


def _collect_to_file(
    collection: Collection,
    task: Task,
    batches: Iterable[Batch],
    out: str | os.PathLike[str],
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> GradientFile:
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"rows with out= are on disk, so device={str(device)!r} has no meaning; leave it out")
    sinks: list[FileSink] = []

    def begin(first_batch: Batch) -> tuple[FileSink, Filler]:
        entries = fingerprint.fields(task, collection, first_batch)
        sink = FileSink(out, collection.num_grads, task.layout.dim, dtype)
        plan = None if sink.file is None else fingerprint.check(sink.file, entries, collection.num_grads, task, dtype)
        filler = collection.resumable_filler(task, plan)
        sink.fingerprint = lambda: fingerprint.encode(entries, filler.plan)
        sinks.append(sink)
        return sink, filler

    collection.run(task, batches, begin)
    file = sinks[0].file
    assert file is not None
    return file

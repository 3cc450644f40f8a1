"""Model + loss + batches -> rows of G, made chunk by chunk: all of them finite, and as many as asked for."""

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradient_file import GradientFile
from mfac.gradients.batches import ALIGNMENT, Batch, cut, num_samples, passes, placed
from mfac.gradients.gauss_newton import GaussNewtonLoss
from mfac.gradients.losses import LossFn, OutputFn, SampleFn, sampled_loss
from mfac.gradients.model_state import evaluation, set_seed, with_own_random_state
from mfac.gradients.per_sample import ChunkPlan, MappedGradients
from mfac.inverse_fisher import ranks_of
from mfac.layout import Masks, ParameterLayout, Params, some
from mfac.memory import available_memory, check_count, gib, is_count

Fisher = Literal["empirical", "sampled", "gauss-newton"]
Method = Literal["auto", "vmap", "loop"]


def collect_gradients(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], num_grads: int, *, params: Params = None,
    per_sample: bool = False, fisher: Fisher = "empirical", masks: Masks = None,
    out: str | os.PathLike[str] | None = None, window: torch.dtype | None = None, dtype: torch.dtype | None = None,
    device: torch.device | str | None = None, cycle: bool = False, progress: bool | None = None,
    sample_fn: SampleFn | None = None, output_fn: OutputFn | None = None, method: Method = "auto",
    chunk_size: int | None = None, seed: int = 0, block_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Float[Tensor, "m d"] | GradientFile:  # fmt: skip
    """The rows of G: the gradients of `num_grads` batches or samples, taken in eval mode.

    The model is left as it was found (training flags, `.grad`, buffers), and so is the random state.

    With a `process_group` its ranks make the rows together, each from batches of its own, and each keeps its columns of
    all rows, as `column_shares` divides them. Row i is made by rank i modulo their number. If one rank fails, all do.

    Args:
        model: any module.
        loss_fn: (model, batch) -> scalar; `criterion_loss` and `model_loss` are ready ones.
        batches: any iterable of tensors, tuples, dicts or encodings; moved to the model's device.
        num_grads: m, the number of rows.
        params: names, "re:..." patterns or tensors, also of frozen parameters; None: every trainable parameter.
        per_sample: one row per sample instead of one per batch; the loss is given batches of one.
        fisher: "empirical" uses the labels of the data, "sampled" draws them from the model's output, "gauss-newton"
            needs none: the mean of g gᵀ over rows estimates the Gauss-Newton matrix of the loss.
        masks: {name or parameter: bool tensor}; only coordinates that are True are in a row.
        out: a file for the rows, written as they come; if it exists, the run is resumed where it stopped.
        window: the dtype of the rows in the file; the same as `dtype`.
        dtype: of the rows; None: that of the parameters.
        device: of the rows; None: that of the parameters.
        cycle: start `batches` again when they run out.
        progress: True shows a bar, False does not, None does on a terminal.
        sample_fn: (model, batch) -> the batch with labels drawn from the model's output, for "sampled".
        output_fn: (model, batch) -> logits [samples, ..., classes] of a softmax, for "sampled" and "gauss-newton"; the
            ready losses know theirs.
        method: how samples become rows: "vmap", "loop", or "auto", which maps where it can; the same rows up to
            rounding.
        chunk_size: samples mapped at once; None: as many as fit a fixed amount of memory.
        seed: of drawn labels and signs, and of what the loss itself draws.
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
        from mfac.distributed.exchange import agreed_exchange

        return agreed_exchange(collection, batches, ranks, block_size, dtype=row_dtype).rows(row_dtype, where)
    if out is not None:
        from mfac.gradients.to_file import collect_to_file

        return collect_to_file(collection, batches, out, row_dtype)
    return collect_rows(collection, batches, row_dtype, where)


def collect_rows(
    collection: "Collection", batches: Iterable[Batch], dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "m d"]:
    """All rows, in memory."""
    grads = new_rows(collection.num_grads, collection.layout.dim, dtype, device)
    with evaluation(collection.model, collection.layout.tensors):
        for chunk in collection.chunks(collection.stream(batches)):
            collection.fill(chunk, grads[chunk.row : chunk.row + chunk.count], zeroed=True)
    return grads


class NotFiniteError(RuntimeError):
    """A loss or a gradient that is not finite; the first `good` rows of the chunk are complete."""

    good = 0


@dataclass
class Chunk:
    """A batch, or some of its samples, and the rows that it makes: `count` of them, from `row` on."""

    batch: Batch
    row: int
    count: int
    index: int
    sample: int | None


@dataclass
class Collection:
    """What rows are the gradients of, and how they are collected.

    Row i that is made here is row first + every · i of the matrix, which is what its random numbers depend on: those of
    the loss and of drawn labels are the same in a run that is resumed or shared by ranks.
    """

    model: nn.Module
    loss_fn: LossFn
    layout: ParameterLayout
    num_grads: int
    per_sample: bool = False
    fisher: str = "empirical"
    method: str = "auto"
    chunk_size: int | None = None
    cycle: bool = False
    progress: bool | None = None
    seed: int = 0
    sample_fn: SampleFn | None = None
    output_fn: OutputFn | None = None
    first: int = 0
    every: int = 1
    plan: ChunkPlan | None = None

    def __post_init__(self) -> None:
        check_count("num_grads", self.num_grads)
        if self.fisher not in get_args(Fisher):
            raise ValueError(f'fisher must be "empirical", "sampled" or "gauss-newton", not {self.fisher!r}')
        if self.method not in ("auto", "vmap", "loop"):
            raise ValueError(f'method must be "auto", "vmap" or "loop", not {self.method!r}')
        if self.chunk_size is not None and not is_count(self.chunk_size):
            raise ValueError(f"chunk_size must be a positive int or None (what fits), not {self.chunk_size!r}")
        if type(self.loss_fn).__module__ == "torch.nn.modules.loss":
            ready = f"mfac.criterion_loss({type(self.loss_fn).__name__}()) for batches (inputs, targets)"
            raise ValueError(f"loss_fn is called as loss_fn(model, batch), unlike the losses of torch.nn; pass {ready}")
        if self.layout.dtype.is_complex:
            found = some(name for name, p in self.model.named_parameters() if p.is_complex())
            raise ValueError(f"rows are real, and there are complex parameters: {found}; name others in params")
        self.loss, self._draw, self.device = self.loss_fn, None, self.layout.device
        if self.fisher == "sampled":
            self.loss, self._draw = sampled_loss(self.loss_fn, self.sample_fn, self.output_fn)
        elif self.sample_fn is not None or (self.output_fn is not None and self.fisher == "empirical"):
            needs = 'sample_fn needs fisher="sampled", output_fn that or "gauss-newton"'
            raise ValueError(f"{needs}, and fisher is {self.fisher!r}; pass it or drop them")
        elif self.fisher == "gauss-newton":
            self.loss = GaussNewtonLoss(self.loss_fn, self.output_fn)
            self._draw = self.loss.draw

    @cached_property
    def mapped(self) -> MappedGradients:
        return MappedGradients(self.model, self._scalar_loss, self.layout, self.method, self.chunk_size, self.plan)

    @property
    def count(self) -> int:
        return len(range(self.first, self.num_grads, self.every))

    def stream(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches one by one; what an iterable draws at random is not disturbed by the seeds of the rows."""
        return with_own_random_state(passes(batches, self.cycle), self.device)

    def chunks(self, stream: Iterable[Batch], done: int = 0, piece: int = sys.maxsize) -> Generator[Chunk, None, None]:
        """What makes the rows from `done` on, in chunks none of which straddles two pieces of `piece` rows.

        Chunks do not depend on `done`, and the same chunk gives the same bits; the first may begin before it.
        """
        row, index = 0, -1
        on_one = all(tensor.device == self.device for tensor in self.layout.tensors)
        device = self.device if on_one else None  # a model on several devices moves its batches itself
        with row_progress(self.count, done, self.progress) as advance:
            for index, batch in enumerate(stream):
                samples, start = num_samples(batch, index) if self.per_sample else 1, 0
                while start < samples and row < self.count:
                    count, part, sample = 1, batch, None
                    if self.per_sample:
                        longest = self.mapped.plan.others if row else self.mapped.plan.first
                        count = min(longest, samples - start, self.count - row, piece - row % piece)
                        part, sample = cut(batch, start, start + count), start
                    if row + count > done:
                        yield Chunk(placed(part, device), row, count, index, sample)
                        advance(row + count - max(row, done))
                    start, row = start + count, row + count
                if row == self.count:
                    return
        if index < 0:
            raise ValueError("batches is empty; at least one batch is needed")
        share = "" if self.every == 1 else f", {self.count} of them from this rank,"
        found = f"{row} samples in {index + 1} batches" if self.per_sample else f"{row} batches"
        asked = f"num_grads={self.num_grads} rows were asked for{share} and batches gave only {found}"
        raise ValueError(f"{asked}; pass more data, a smaller num_grads, or cycle=True")

    def pieces(
        self, stream: Iterable[Batch], most: int = 1, dtype: torch.dtype | None = None, exact: bool = False
    ) -> Generator[Float[Tensor, "n d"], None, None]:
        """All rows, checked, up to `most` at a time, or a chunk if that is longer; in memory that is used again.

        If `exact`, all pieces but the last have `most` rows.
        """
        with torch.inference_mode(False):
            rows = torch.empty(most, self.layout.dim, dtype=dtype or self.layout.dtype, device=self.device)
        filled = 0
        for chunk in self.chunks(stream, piece=most if exact else sys.maxsize):
            if filled and filled + chunk.count > len(rows):
                yield rows[:filled]
                filled = 0
            if chunk.count > len(rows):
                rows = rows.new_empty(chunk.count, rows.shape[1])
            self.fill(chunk, rows[filled : filled + chunk.count])
            filled += chunk.count
        yield rows[:filled]

    def drawn(self, batch: Batch, seeds: Sequence[int]) -> Batch:
        """What `loss` takes: the batch with labels or signs, those of each row from a seed of its own."""
        if self._draw is None:
            return batch
        set_seed(seeds[0], self.device)
        with torch.no_grad():
            return self._draw(self.model, batch, seeds)

    def fill(self, chunk: Chunk, out: Float[Tensor, "c d"], zeroed: bool = False) -> None:
        """Writes the rows of a chunk into `out`, which may hold zeros already; NotFiniteError if one is not finite."""
        batch = self.drawn(chunk.batch, [self._seed(chunk.row + position) + 1 for position in range(chunk.count)])
        filled, refused = None, None
        if self.per_sample:
            set_seed(self._seed(chunk.row), self.device)
            try:
                filled = self.mapped.fill(batch, out, zeroed)
            except Exception as error:
                refused = error
        if filled is None:
            singles = (cut(batch, i, i + 1) for i in range(chunk.count))
            filled = self._loop(singles if self.per_sample else [batch], chunk.row, out)
        if refused is not None:  # and not the loss function's own fault, which the loop would have raised
            self.mapped.refuse(refused)
        losses, probe = filled
        if not math.isfinite(float(probe)):
            _check_finite(chunk, losses.tolist(), out)

    def _loop(self, batches: Iterable[Batch], row: int, out: Tensor) -> tuple[Tensor, Tensor]:
        """One row per batch: the losses, and a sum of losses and rows, which is finite only if all of them are."""
        losses = []
        for position, (batch, into) in enumerate(zip(batches, out.unbind(), strict=True)):
            set_seed(self._seed(row + position), self.device)
            loss = differentiable(self._scalar_loss(self.model, batch))
            self.layout.flatten(torch.autograd.grad(loss, self.layout.tensors, allow_unused=True), into)
            losses.append(loss.detach())
        values, total = torch.stack(losses), out.sum(dtype=torch.float32 if out.dtype.itemsize < 4 else None)
        return values, total + values.sum().to(total.device)

    def _scalar_loss(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        return scalar(self.loss(model, batch))

    def _seed(self, row: int) -> int:
        """For what the loss draws; the next number is for labels."""
        return (self.seed * 0x9E3779B97F4A7C15 + 2 * (self.first + self.every * row)) % 2**63


def scalar(loss: Any) -> Float[Tensor, ""]:
    """The loss itself; raises ValueError if it is no scalar tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn(model, batch) must return a scalar tensor, it returned {found}; reduce it")
    return loss.reshape(()) if loss.ndim else loss  # a view would be one more step in the backward pass


def loss_value(loss_fn: LossFn, model: nn.Module, batch: Batch) -> float:
    """The loss, without gradients unless it or the model differentiates by itself."""
    try:
        with torch.no_grad():
            return float(scalar(loss_fn(model, batch)))
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    return float(scalar(loss_fn(model, batch)).detach())


def differentiable(loss: Tensor) -> Tensor:
    """The loss itself; raises ValueError if it has no gradient."""
    if not loss.requires_grad:
        calls = "loss_fn(model, batch) must call the model with gradients on"
        raise ValueError(f"the loss does not depend on any trainable parameter; {calls}")
    return loss


@contextmanager
def row_progress(total: int, done: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """A function to be called with the number of new rows; it moves a bar, on a terminal or where one is asked for."""
    wanted = sys.stderr.isatty() if progress is None else progress
    installed = wanted and importlib.util.find_spec("rich") is not None
    if progress and not installed:
        raise ValueError("progress=True needs rich, which is not installed; pip install 'torch-mfac[progress]'")
    if not installed:
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("gradients"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("gradients", total=total, completed=done)
        yield lambda rows: bar.advance(task, rows)


def _check_finite(chunk: Chunk, losses: list[float], rows: Tensor) -> None:
    """Looks for the first row that is not finite: sums may overflow where no number does."""
    for position, (loss, row) in enumerate(zip(losses, rows, strict=True)):
        if not math.isfinite(loss) or not bool(torch.isfinite(row).all()):
            what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
            where = ("" if chunk.sample is None else f"sample {chunk.sample + position} of ") + f"batch {chunk.index}"
            error = NotFiniteError(
                f"the {what} of {where} is not finite; the {chunk.row + position} rows before it are good. "
                f"Check that batch and the scale of the loss, or use a dtype of wider range than {rows.dtype}"
            )
            error.good = position
            raise error


def new_rows(num_grads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "m d"]:
    """Zeros that take memory only where they are written to, unlike `torch.zeros`; or MemoryError."""
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
        raise ValueError(f"window={window!r} applies to rows in a file; pass out=, or dtype= instead")
    if window is not None and dtype is not None:
        raise ValueError(f"window={window!r} and dtype={dtype!r} both set how rows are stored; pass one of them")
    chosen = window or dtype or layout.dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        name = "dtype" if window is None else "window"
        raise ValueError(f"rows are floating-point numbers, and {name} is {chosen!r}; use torch.float32 or bfloat16")
    return chosen

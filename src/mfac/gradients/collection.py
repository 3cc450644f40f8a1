"""The rows of G, made chunk by chunk: batches in, gradients out, all of them finite and as many as asked for."""

import math
import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradients.batches import Batch, cut, num_samples, placed, singles
from mfac.gradients.labels import Noise
from mfac.gradients.losses import LossFn, OutputFn, SampleFn, sampled_loss
from mfac.gradients.model_state import set_seed, with_own_random_state
from mfac.gradients.per_sample import MappedGradients, Plan
from mfac.layout import ParameterLayout


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

    def name(self, position: int) -> str:
        return (
            f"batch {self.index}" if self.sample is None else f"sample {self.sample + position} of batch {self.index}"
        )


@dataclass
class Collection:
    """What rows are the gradients of, and how they are collected.

    Row i that is made here is row first + every · i of the matrix, which is what its random numbers depend on: those of
    the loss and of drawn labels are the same in a run that is resumed or shared by ranks.

    Raises:
        ValueError: an argument that does not fit.
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
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_grads, int) or isinstance(self.num_grads, bool) or self.num_grads < 1:
            raise ValueError(f"num_grads must be a positive int, not {self.num_grads!r}")
        if self.fisher not in ("empirical", "sampled"):
            raise ValueError(f'fisher must be "empirical" or "sampled", not {self.fisher!r}')
        if self.method not in ("auto", "vmap", "loop"):
            raise ValueError(f'method must be "auto", "vmap" or "loop", not {self.method!r}')
        if self.chunk_size is not None and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise ValueError(f"chunk_size must be a positive int or None (what fits), not {self.chunk_size!r}")
        if type(self.loss_fn).__module__ == "torch.nn.modules.loss":
            name = type(self.loss_fn).__name__
            raise ValueError(
                f"loss_fn is called as loss_fn(model, batch), and {name} takes outputs and targets; "
                f"pass mfac.criterion_loss({name}()) for batches (inputs, targets)"
            )
        self._loss, self._draw = self.loss_fn, None
        self.device = self.layout.device
        if self.fisher == "sampled":
            self._loss, self._draw = sampled_loss(self.loss_fn, self.sample_fn, self.output_fn)
        elif self.sample_fn is not None or self.output_fn is not None:
            raise ValueError('sample_fn and output_fn draw labels, which needs fisher="sampled"; pass it or drop them')

    @cached_property
    def mapped(self) -> MappedGradients:
        return MappedGradients(self.model, self._scalar_loss, self.layout, self.method, self.chunk_size, self.plan)

    @property
    def count(self) -> int:
        """How many rows are made here."""
        return len(range(self.first, self.num_grads, self.every))

    def chunks(self, batches: Iterable[Batch], done: int = 0, piece: int = sys.maxsize) -> Generator[Chunk, None, None]:
        """What makes the rows from `done` on, in chunks none of which straddles two pieces of `piece` rows.

        Chunks do not depend on `done`, and the same chunk gives the same bits; the first may begin before it.

        Raises:
            ValueError: too few batches.
        """
        row, index = 0, -1
        on_one = all(tensor.device == self.device for tensor in self.layout.tensors)
        device = self.device if on_one else None  # a model on several devices moves its batches itself
        with self._bar(done) as advance:
            for index, batch in enumerate(with_own_random_state(batches, self.device)):
                samples, start = num_samples(batch, index) if self.per_sample else 1, 0
                while start < samples and row < self.count:
                    count, part, sample = 1, batch, None
                    if self.per_sample:
                        longest = self.mapped.chunk_length(row)
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
        raise ValueError(
            f"num_grads={self.num_grads} rows were asked for{share} and batches gave only {found}; "
            "pass more data, a smaller num_grads, or cycle=True to go through it again"
        )

    def fill(self, chunk: Chunk, out: Float[Tensor, "c d"], zeroed: bool = False) -> None:
        """Writes the rows of a chunk into `out`, which may hold zeros already.

        Raises:
            NotFiniteError: a loss or a gradient is not finite.
        """
        batch = chunk.batch if self._draw is None else self._with_drawn_labels(chunk)
        filled = None
        if self.per_sample:
            set_seed(self._seed(chunk.row), self.device)
            try:
                filled = self.mapped.fill(batch, out, zeroed)
            except Exception as error:
                filled = self._loop(singles(batch), chunk.row, out)  # raises what is the loss function's own fault
                self.mapped.refuse(error)
        if filled is None:
            filled = self._loop(singles(batch) if self.per_sample else [batch], chunk.row, out)
        losses, is_finite = filled
        if not is_finite:
            _check_finite(chunk, losses, out)

    def _loop(self, batches: Iterable[Batch], row: int, out: Tensor) -> tuple[list[float], bool]:
        """One row per batch: the losses, and whether losses and rows are surely finite."""
        losses, total = [], 0.0
        for position, (batch, into) in enumerate(zip(batches, out.unbind(), strict=True)):
            set_seed(self._seed(row + position), self.device)
            loss = self._scalar_loss(self.model, batch)
            if not loss.requires_grad:
                raise ValueError(
                    "the loss does not depend on any trainable parameter of the model; loss_fn(model, batch) must call "
                    "the model it is given, with gradients on"
                )
            self.layout.flatten(torch.autograd.grad(loss, self.layout.tensors, allow_unused=True), into)
            losses.append(loss.item())
            total += losses[-1] + into.sum(dtype=torch.float32 if into.dtype.itemsize < 4 else None).item()
        return losses, math.isfinite(total)

    def _scalar_loss(self, model: nn.Module, batch: Batch) -> Float[Tensor, ""]:
        loss: Any = self._loss(model, batch)
        if isinstance(loss, Tensor) and loss.ndim == 0:
            return loss  # a view would be one more step in the backward pass
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_fn(model, batch) must return a scalar tensor, it returned {found}; reduce it by .mean()"
            )
        return loss.reshape(())

    def _with_drawn_labels(self, chunk: Chunk) -> Batch:
        assert self._draw is not None
        noise = Noise([self._seed(chunk.row + position) + 1 for position in range(chunk.count)])
        set_seed(noise.seeds[0], self.device)
        with torch.no_grad():
            return self._draw(self.model, chunk.batch, noise)

    def _seed(self, row: int) -> int:
        """For what the loss draws; the next number is for labels."""
        return (self.seed * 0x9E3779B97F4A7C15 + 2 * (self.first + self.every * row)) % 2**63

    def _bar(self, done: int) -> AbstractContextManager[Any]:
        if self.progress is False or not (self.progress or sys.stderr.isatty()):
            return nullcontext(lambda rows: None)
        from mfac.progress import row_progress

        return row_progress(self.count, done, self.progress)


def _check_finite(chunk: Chunk, losses: list[float], rows: Tensor) -> None:
    """Looks for the first row that is not finite: sums may overflow where no number does."""
    for position, (loss, row) in enumerate(zip(losses, rows, strict=True)):
        if not math.isfinite(loss) or not bool(torch.isfinite(row).all()):
            what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
            error = NotFiniteError(
                f"the {what} of {chunk.name(position)} is not finite; the {chunk.row + position} rows before it are "
                f"good. Check that batch and the scale of the loss, or use a dtype of wider range than {rows.dtype}"
            )
            error.good = position
            raise error

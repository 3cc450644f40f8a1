"""The run behind every collector: batches in, rows into a sink, all of them finite, as many as asked."""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradients.batches import Batch, passes
from mfac.gradients.chunks import Samples, Stretch, samples, stretches
from mfac.gradients.fillers import ROWS_AT_ONCE, BatchFiller, Plan, SampleFiller, Task
from mfac.gradients.losses import OutputFn, SampleFn, sampled_loss
from mfac.gradients.model_state import evaluation
from mfac.gradients.one_batch import Filled, LossFn
from mfac.gradients.row_sinks import RowSink
from mfac.layout import ParameterLayout
from mfac.progress import row_progress

Filler = BatchFiller | SampleFiller


@dataclass(frozen=True)
class Collection:
    """How rows are collected: the arguments that every collector shares, checked.

    `total` is given where other ranks make rows too: how many they and this one make together.

    Raises:
        ValueError: one of them does not fit.
    """

    num_grads: int
    per_sample: bool
    fisher: str
    method: str
    chunk_size: int | None
    cycle: bool
    progress: bool | None
    seed: int
    total: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_grads, int) or isinstance(self.num_grads, bool) or self.num_grads < 1:
            raise ValueError(f"num_grads must be a positive int, not {self.num_grads!r}")
        if self.fisher not in ("empirical", "sampled"):
            raise ValueError(f'fisher must be "empirical" or "sampled", not {self.fisher!r}')
        if self.method not in ("auto", "vmap", "loop"):
            raise ValueError(f'method must be "auto", "vmap" or "loop", not {self.method!r}')
        if self.chunk_size is not None and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise ValueError(f"chunk_size must be a positive int or None (what fits), not {self.chunk_size!r}")

    def task(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        layout: ParameterLayout,
        sample_fn: SampleFn | None,
        output_fn: OutputFn | None,
    ) -> Task:
        """What each row is the gradient of.

        Raises:
            ValueError: the loss function is a bare criterion, or labels cannot be drawn.
        """
        if type(loss_fn).__module__ == "torch.nn.modules.loss":
            name = type(loss_fn).__name__
            raise ValueError(
                f"loss_fn is called as loss_fn(model, batch), and {name} takes outputs and targets; "
                f"pass mfac.criterion_loss({name}()) for batches (inputs, targets)"
            )
        draw = None
        if self.fisher == "sampled":
            loss_fn, draw = sampled_loss(loss_fn, sample_fn, output_fn)
        elif sample_fn is not None or output_fn is not None:
            raise ValueError(
                'sample_fn and output_fn draw labels, which only fisher="sampled" does; say so or drop them'
            )
        return Task(model, loss_fn, layout, draw, self.seed)

    def filler(self, task: Task) -> Filler:
        """What fills the rows of a run that starts and ends here."""
        if not self.per_sample:
            return BatchFiller(task, ROWS_AT_ONCE)
        measure = not torch.are_deterministic_algorithms_enabled()
        return SampleFiller(task, self.method, self.chunk_size, measure=measure)

    def resumable_filler(self, task: Task, plan: Plan | None) -> Filler:
        """What fills the rows of a run that may go on from an earlier one: two such runs give the same bits."""
        if not self.per_sample:
            return BatchFiller(task, 1)  # a row that is made is written
        return SampleFiller(task, self.method, self.chunk_size, plan)

    def run(self, task: Task, batches: Iterable[Batch], begin: Callable[[Batch], tuple[RowSink, Filler]]) -> None:
        """Fills the sink that `begin` gives when it is shown the first batch.

        Raises:
            ValueError: too few batches.
            RuntimeError: a loss or a gradient that is not finite; the rows before it are in the sink.
        """
        with evaluation(task.model):
            for _ in self.chunks(task, batches, begin):
                pass

    def chunks(
        self,
        task: Task,
        batches: Iterable[Batch],
        begin: Callable[[Batch], tuple[RowSink, Filler]],
        piece: int | None = None,
    ) -> Generator[None, None, None]:
        """The same, a chunk of rows at a time, none of which straddles two pieces of `piece` rows."""
        stream = passes(batches, self.cycle)
        head = list(itertools.islice(stream, 1))
        if not head:
            raise ValueError("batches is empty; at least one batch is needed")
        sink, filler = begin(head[0])
        if sink.done >= self.num_grads:
            return
        stream = itertools.chain(head, stream)
        if type(batches) not in (list, tuple):  # for which nothing is drawn
            stream = task.seeds.apart(stream)
        with row_progress(self.num_grads, sink.done, self.progress) as advance:
            for chunk in self._chunks(stream, filler, sink, piece or self.num_grads):
                if added := _add_rows(filler, sink, chunk):
                    advance(added)
                    yield

    def _chunks(
        self, stream: Iterator[Batch], filler: Filler, sink: RowSink, piece: int
    ) -> Iterator[Samples | Stretch]:
        if isinstance(filler, SampleFiller):
            found = yield from samples(stream, filler, sink, self.num_grads, piece)
        else:
            found = yield from stretches(stream, filler, sink, self.num_grads, piece)
        if found is None:
            return
        asked = f"num_grads={self.num_grads} rows were asked for"
        if self.total is not None:
            asked = f"num_grads={self.total} rows were asked for, {self.num_grads} of them from this rank,"
        raise ValueError(
            f"{asked} and batches gave only {found}; "
            "pass more data, a smaller num_grads, or cycle=True to go through it again"
        )


def _add_rows(filler: Filler, sink: RowSink, chunk: Samples | Stretch) -> int:
    """Fills the rows of a chunk that the sink does not have, and returns how many they are."""
    known = sink.done - chunk.row
    room, zeroed = sink.room(chunk.count - known)
    # A chunk that was half written is done again as a whole: the same chunk gives the same bits.
    rows = room if known == 0 else room.new_empty(chunk.count, room.shape[1])
    filled = filler.fill(chunk.batch, rows, chunk.row, zeroed and known == 0)
    count = len(filled.losses)
    bad = _first_not_finite(filled, rows[:count])
    if known:
        room.copy_(rows[known:])
    sink.take((count if bad is None else bad) - known)
    if bad is not None:
        loss = filled.losses[bad]
        what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
        raise RuntimeError(
            f"the {what} of {chunk.name(bad)} is not finite; the {sink.done} rows before it are good. Look at that "
            f"batch and at the scale of the loss, or use a dtype of wider range than {rows.dtype}"
        )
    return count - known


def _first_not_finite(filled: Filled, rows: Float[Tensor, "c d"]) -> int | None:
    """The position of the first row that has a loss or a number that is not finite."""
    if filled.is_finite:
        return None
    for position, (loss, row) in enumerate(zip(filled.losses, rows, strict=True)):
        if not math.isfinite(loss) or not bool(torch.isfinite(row).all()):
            return position
    return None


def describe(loss_fn: Any) -> str:
    """A name for a loss function that is the same in the next process."""
    name: str = getattr(loss_fn, "__qualname__", "") or repr(loss_fn)
    return type(loss_fn).__name__ if " at 0x" in name else name

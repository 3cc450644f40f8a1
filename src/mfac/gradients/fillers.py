"""Rows filled from batches: one a batch, or one a sample by the faster of two methods that both give the same row."""

import itertools
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradients.batches import Batch, cut, singles
from mfac.gradients.labels import Noise
from mfac.gradients.losses import Draw
from mfac.gradients.one_batch import BatchGradient, Filled, LossFn
from mfac.gradients.per_sample import MappedGradients
from mfac.gradients.row_seeds import RowSeeds
from mfac.gradients.row_sinks import STAGING_BYTES
from mfac.layout import ParameterLayout
from mfac.memory import available_memory

ACTIVATION_BYTES = 96 * 2**20
FIRST_CHUNK = 8
LARGEST_CHUNK = 128
LOOP_CHUNK = 16
TRIAL_CHUNK = 32  # samples, while it is not known which method is faster
MOST_TRIALS = 4  # where no two chunks in a row have the same length
ROWS_AT_ONCE, SECONDS_AT_ONCE = 32, 0.2  # of batches


@dataclass
class Task:
    """What a row is the gradient of; `draw` replaces the labels of a batch where they are to be sampled.

    `seed`, `first` and `every` are those of `RowSeeds`.
    """

    model: nn.Module
    loss_fn: LossFn
    layout: ParameterLayout
    draw: Draw | None
    seed: int
    first: int = 0
    every: int = 1

    @cached_property
    def device(self) -> torch.device:
        """Where rows are made."""
        return self.layout.device

    @cached_property
    def batch_device(self) -> torch.device | None:
        """Where batches are moved to: where the model is; None if it is on several devices and moves them itself."""
        return self.device if all(tensor.device == self.device for tensor in self.layout.tensors) else None

    def labelled(self, batch: Batch, row: int, count: int = 1) -> Batch:
        """The batch that the loss is given, which makes `count` rows, from `row` on."""
        if self.draw is None:
            return batch
        noise = Noise([self.seeds.of_labels(row + position) for position in range(count)])
        self.seeds.start(noise.seeds[0])
        with torch.no_grad():
            return self.draw(self.model, batch, noise)

    def loop(
        self,
        batches: Iterable[Batch],
        out: Float[Tensor, "c d"],
        row: int,
        zeroed: bool = False,
        seconds: float = math.inf,
    ) -> Filled:
        """Fills one row a batch, one after the other, until the batches or the seconds are over."""
        end, seeds, fill, checks = time.perf_counter() + seconds, self.seeds, self._gradient.fill, []
        rows = zip(itertools.count(row), batches, out.unbind(), self._gradient.places(out), strict=False)
        for number, batch, into, places in rows:
            seeds.start(seeds.of(number))
            checks.append(fill(batch, into, places, zeroed))
            if time.perf_counter() > end:
                break
        # Numbers are asked for when all rows are on their way: an accelerator would have to be waited for at each.
        losses = [float(loss) for loss, _ in checks]
        return Filled(losses, math.isfinite(sum(losses) + sum(total.item() for _, total in checks)))

    def mapped(self, mapping: MappedGradients, batch: Batch, out: Tensor, row: int, zeroed: bool) -> Filled:
        """Fills the rows of a chunk."""
        self.seeds.start(self.seeds.of(row))
        return mapping.fill(batch, out, zeroed)

    @cached_property
    def _gradient(self) -> BatchGradient:
        return BatchGradient(self.model, self.loss_fn, self.layout)

    @cached_property
    def seeds(self) -> RowSeeds:
        """What the rows' random numbers are drawn from."""
        return RowSeeds(self.seed, self.device, self.first, self.every)


@dataclass
class Plan:
    """How samples become rows: the method ("vmap" or "loop") and the lengths of the first chunk and of the others.

    Rounding may differ between methods and lengths, so a run that is resumed goes by the plan that it began with.
    """

    method: str
    first: int
    others: int


class BatchFiller:
    """One row a batch, at most `at_once` of them at a time: fewer if they take long, so that progress shows."""

    plan: Plan | None = None

    def __init__(self, task: Task, at_once: int):
        self.task = task
        self.at_once = at_once

    def fill(self, batches: Iterator[Batch], out: Float[Tensor, "c d"], row: int, zeroed: bool) -> Filled:
        """Writes rows for as many batches as are drawn."""
        if self.task.draw is not None:
            batches = (self.task.labelled(batch, row + position) for position, batch in enumerate(batches))
        return self.task.loop(batches, out, row, zeroed, SECONDS_AT_ONCE)


class SampleFiller:
    """One row a sample, a chunk of samples at a time.

    Args:
        task: what the rows are gradients of.
        method: "vmap", "loop", or "auto": vmap, unless an operation cannot be mapped or the loop is faster.
        chunk_size: samples in a chunk; None: what keeps a chunk within a fixed amount of memory.
        plan: the plan of a run that is gone on with.
        measure: where it is not clear which method is faster, time both; else go by the length of the chunks, so that
            every run makes the same choice.
    """

    def __init__(
        self,
        task: Task,
        method: str = "auto",
        chunk_size: int | None = None,
        plan: Plan | None = None,
        measure: bool = False,
    ):
        self.task = task
        self.measure = measure
        self.method = method
        self.chunk_size = chunk_size
        self.plan = plan
        self._mapping = MappedGradients(task.model, task.loss_fn, task.layout)
        self._staging = torch.empty(0, task.layout.full_dim, dtype=task.layout.dtype, device=task.layout.device)
        self._warned = False
        self._undecided = False
        self._trials: list[int] = []

    def chunk_length(self, row: int) -> int:
        """How many samples the chunk that starts at this row has."""
        if self.plan is not None:
            length = self.plan.first if row == 0 else self.plan.others
            return min(length, TRIAL_CHUNK) if self._undecided and self.chunk_size is None else length
        return self.chunk_size or self._fitting(FIRST_CHUNK)

    def fill(self, batch: Batch, out: Float[Tensor, "c d"], row: int, zeroed: bool) -> Filled:
        """Writes the rows of a chunk."""
        batch = self.task.labelled(batch, row, len(out))
        if self.plan is None:
            return self._fill_first(batch, out, row, zeroed)
        if self.plan.method == "loop":
            return self._loop(batch, out, row, zeroed)
        start = time.perf_counter()
        try:
            filled = self._map(batch, out, row, zeroed)
        except Exception as error:
            return self._fall_back(batch, out, row, error)
        if self._undecided:
            self._wait()
            # The first chunk of a length asks the system for memory, which can take longer than all the rest.
            if self._trials[-1:] == [len(out)] or len(self._trials) == MOST_TRIALS:
                self._decide(batch, out, row, time.perf_counter() - start)
            self._trials.append(len(out))
        return filled

    def _fill_first(self, batch: Batch, out: Tensor, row: int, zeroed: bool) -> Filled:
        """Fills the chunk and plans the others."""
        first = len(out) if self.chunk_size is None else self.chunk_size
        self.plan = Plan("loop", first, self.chunk_size or self._fitting(LOOP_CHUNK))
        if self.method == "loop" or first == 1:
            return self._loop(batch, out, row, zeroed)
        try:
            filled = self._map(batch, out, row, zeroed)
        except Exception as error:
            return self._fall_back(batch, out, row, error)
        others = self.chunk_size or self._others(staged=not (zeroed and self._is_direct(out)))
        is_clear = self.method == "vmap" or self._mapping.is_plain
        if not is_clear and not self.measure and others < FIRST_CHUNK:
            return self._loop(batch, out, row)
        self._undecided = self.measure and not is_clear
        self.plan = Plan("vmap", first, others)
        return filled

    def _decide(self, batch: Batch, out: Tensor, row: int, seconds: float) -> None:
        """Goes over to the loop if that takes less time for a chunk than mapping has: two samples tell."""
        self._undecided = False
        spare = torch.empty_like(out[:1])
        single = [cut(batch, 0, 1)]
        self.task.loop(single, spare, row)
        self._wait()
        start = time.perf_counter()
        for _ in range(2):
            self.task.loop(single, spare, row)
        self._wait()
        loop_seconds = (time.perf_counter() - start) / 2 * len(out)
        if self.plan is not None and seconds > 1.05 * loop_seconds:
            self.plan.method = "loop"

    def _map(self, batch: Batch, out: Tensor, row: int, zeroed: bool) -> Filled:
        layout = self.task.layout
        if self._is_direct(out):
            return self.task.mapped(self._mapping, batch, out, row, zeroed)
        if len(self._staging) < len(out):
            self._staging = self._staging.new_empty(len(out), layout.full_dim)
        full = self._staging[: len(out)]
        filled = self.task.mapped(self._mapping, batch, full, row, False)
        layout.compress(full, out)
        return filled._replace(is_finite=filled.is_finite and torch.finfo(out.dtype).max >= torch.finfo(full.dtype).max)

    def _is_direct(self, out: Tensor) -> bool:
        layout = self.task.layout
        return not layout.masked and (out.dtype, out.device) == (layout.dtype, layout.device)

    def _loop(self, batch: Batch, out: Tensor, row: int, zeroed: bool = False) -> Filled:
        return self.task.loop(singles(batch), out, row, zeroed)

    def _fall_back(self, batch: Batch, out: Tensor, row: int, error: Exception) -> Filled:
        """The loop; where that fails too, the fault is not vmap's and the loop's error is the one to see."""
        filled = self._loop(batch, out, row)
        if self.method == "vmap":
            raise ValueError(f'method="vmap" cannot map this model: {_first_line(error)}; use method="auto"') from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"per-sample gradients are taken one by one, because vmap cannot map this model: {_first_line(error)}",
                stacklevel=2,
            )
        return filled

    def _others(self, staged: bool) -> int:
        """The largest power of two that keeps the activations of a chunk, and its rows if staged, in their budgets."""
        fitting = min(LARGEST_CHUNK, min(ACTIVATION_BYTES, self._budget()) // self._mapping.bytes_per_sample)
        if staged:
            fitting = self._fitting(fitting)
        return 1 << (max(1, fitting).bit_length() - 1)

    def _fitting(self, length: int) -> int:
        """So many rows, or fewer if they would not fit."""
        return max(1, min(length, self._budget() // self._row_bytes))

    @property
    def _row_bytes(self) -> int:
        return self.task.layout.full_dim * self.task.layout.dtype.itemsize

    def _budget(self) -> int:
        available = available_memory(self.task.layout.device)
        return STAGING_BYTES if available is None else max(1, min(STAGING_BYTES, available // 4))

    def _wait(self) -> None:
        if self.task.layout.device.type != "cpu":
            torch.get_device_module(self.task.layout.device).synchronize(self.task.layout.device)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0]
    return line if len(line) <= 200 else line[:200] + " ..."

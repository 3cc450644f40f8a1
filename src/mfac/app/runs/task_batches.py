"""A task's training batches on the device of a run, drawn from the seeds of the run."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch

from mfac.app.runs.random_state import seeded
from mfac.app.tasks import Task
from mfac.gradients.batches import move

BATCHES_PER_EPOCH = 1 << 20  # keeps the seeds of the batches of two epochs apart
END = object()


class TaskBatches:
    """The batches of a task; each pass calls `train_batches()` again.

    A loader with its own generator is seeded from the global random state at the start of each pass. `on_batch` is
    called for every batch.
    """

    def __init__(self, task: Task, device: torch.device, on_batch: Callable[[], None] = lambda: None):
        self._task, self._device, self._on_batch = task, device, on_batch

    def __iter__(self) -> Iterator[Any]:
        batches = self._task.train_batches()
        generator = getattr(batches, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        for batch in batches:
            self._on_batch()
            yield move(batch, self._device)

    def count(self) -> int:
        """The number of batches in one pass.

        Raises:
            ValueError: there are none.
        """
        batches = self._task.train_batches()
        try:
            found = len(batches)  # type: ignore[arg-type]
        except TypeError:
            with seeded(0):
                found = sum(1 for _ in batches)
        if not found:
            raise ValueError(f"train_batches() of {self._task.name} returned no batches; at least one is required")
        return found


def epoch(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """One pass over the batches, whose random numbers (order, augmentation) depend on `seed` alone."""
    iterator: Iterator[Any] | None = None
    for number in count():
        with seeded(seed * BATCHES_PER_EPOCH + number):
            iterator = iter(batches) if iterator is None else iterator
            batch = next(iterator, END)
        if batch is END:
            return
        yield batch

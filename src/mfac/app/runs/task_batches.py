"""A task's training batches on the device of a run, drawn from the seeds of the run."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from mfac.app.tasks import Task
from mfac.gradients.batches import move
from mfac.gradients.model_state import seeded


class TaskBatches:
    """The batches of a task; each pass calls `train_batches()` again.

    A loader with its own generator is seeded from the global random state at the start of each pass. `on_batch` is
    called for every batch.
    """

    def __init__(self, task: Task, device: torch.device):
        self.on_batch: Callable[[], None] = lambda: None
        self._task, self._device = task, device

    def __iter__(self) -> Iterator[Any]:
        batches = self._task.train_batches()
        generator = getattr(batches, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        for batch in batches:
            self.on_batch()
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


def epochs(batches: Iterable[Any], seed: int, epoch: int = 0, skip: int = 0) -> Iterator[tuple[int, int, Any]]:
    """Endless passes from an epoch on, without its first `skip` batches: (epoch, batches drawn of it, batch).

    The random numbers of a batch (order, augmentation) depend on the seed, the epoch and its place alone.

    Raises:
        ValueError: an epoch has no batches.
    """
    for current in count(epoch):
        drawn, iterator = 0, None
        while True:
            with seeded(int(np.random.SeedSequence((seed, current, drawn)).generate_state(1)[0])):
                iterator = iter(batches) if iterator is None else iterator
                found = list(islice(iterator, 1))
            if not found:
                break
            drawn += 1
            if current > epoch or drawn > skip:
                yield current, drawn, found[0]
        if not drawn:
            raise ValueError("train_batches() returned no batches; at least one is required")

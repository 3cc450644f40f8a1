"""A task's training batches as a run needs them: on its device, drawn from its own seeds, to be taken up anywhere."""

from collections.abc import Callable, Iterable, Iterator

import torch

from mfac.app.runs.random_state import PrivateRandomness, seeded
from mfac.app.tasks import Task
from mfac.gradients.batches import Batch, move
from mfac.pruning.batch_stream import BatchStream

END = object()


class TaskBatches:
    """The batches of a task on a device, as many passes as wanted; each pass asks the task for them anew.

    A loader with a generator of its own is seeded from the global random state, like all else, when a pass begins.
    """

    def __init__(self, task: Task, device: torch.device):
        self._task, self._device = task, device

    def __iter__(self) -> Iterator[Batch]:
        batches = self._task.train_batches()
        generator = getattr(batches, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        for batch in batches:
            yield move(batch, self._device)

    def count(self) -> int:
        """Batches of one pass; where the task's batches do not know it, they are counted.

        Raises:
            ValueError: there is none.
        """
        batches = self._task.train_batches()
        try:
            count = len(batches)  # type: ignore[arg-type]
        except TypeError:
            with seeded(0):
                count = sum(1 for _ in batches)
        if not count:
            raise ValueError(f"train_batches() of {self._task.name} gives no batch; at least one is needed")
        return count


def epoch(batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
    """One pass, whose draws (an order, an augmentation) come from random states of its own that `seed` decides."""
    own = PrivateRandomness(seed)
    iterator: Iterator[Batch] | None = None
    while True:
        with own:
            iterator = iter(batches) if iterator is None else iterator
            batch = next(iterator, END)
        if batch is END:
            return
        yield batch


class CountedStream(BatchStream):
    """A walk through the batches that knows how far it has come, so that another process can take it up there.

    The batches that losses are reported on are the first ones, for the whole of the walk.
    """

    def __init__(self, batches: Iterable[Batch], seed: int):
        super().__init__(batches, seed)
        self.on_batch: Callable[[], None] = lambda: None
        self._first: list[Batch] = []

    def __next__(self) -> Batch:
        batch = super().__next__()
        self.on_batch()
        return batch

    def peek(self, count: int) -> list[Batch]:
        """The first `count` batches of the walk, wherever it is now."""
        if not self.drawn and len(self._first) < count:
            self._first = super().peek(count)
        return self._first[:count]

    def resume_at(self, drawn: int, probes: int) -> None:
        """Goes to where a walk that was interrupted had come to; `probes` batches were peeked at."""
        self.peek(probes)
        while self.drawn < drawn:
            super().__next__()

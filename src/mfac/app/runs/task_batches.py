"""A task's batches on the device of a run, drawn from the seeds of the run; the loss and measure of a model."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mfac.app.tasks import Task
from mfac.gradients.batches import move, sample_tensors
from mfac.gradients.model_state import evaluation, seeded


class TaskBatches:
    """The batches of a task, with a call of `on_batch` for each; each pass calls `train_batches()` again.

    A loader with its own generator is seeded from the global random state at the start of each pass.
    """

    def __init__(self, task: Task, device: torch.device):
        self.on_batch: Callable[[], None] = lambda: None
        self._task, self._device = task, device

    def __iter__(self) -> Iterator[Any]:
        batches = self._task.train_batches()
        generator = getattr(batches, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        is_empty = True
        for batch in batches:
            is_empty = False
            self.on_batch()
            yield move(batch, self._device)
        self._check(is_empty)

    def __len__(self) -> int:
        batches = self._task.train_batches()
        try:
            found = len(batches)  # type: ignore[arg-type]
        except TypeError:
            with seeded(0):
                found = sum(1 for _ in batches)
        self._check(found == 0)
        return found

    def _check(self, is_empty: bool) -> None:
        if is_empty:
            raise ValueError(f"train_batches() of {self._task.name} returned no batches; each call must return some")


def epochs(batches: Iterable[Any], seed: int, epoch: int = 0, skip: int = 0) -> Iterator[tuple[int, int, Any]]:
    """Endless passes from an epoch on, without its first `skip` batches: (epoch, batches drawn of it, batch).

    The random numbers of a batch (order, augmentation) depend on the seed, the epoch and its place alone.
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


TRAIN_BATCHES = 8  # for the loss of a task without held-out batches
LABELS = (torch.int64, torch.int32, torch.uint8)


def measure(task: Task, model: nn.Module, device: torch.device) -> dict[str, float | None]:
    """{"loss": mean over the held-out batches (or the first training batches), "measure": the task's}.

    A task without `evaluate` is measured by its accuracy, if its held-out batches are (inputs, labels) and the model
    returns class scores. Unknown and non-finite values are None. The model, its mode and the random state are left as
    they were.
    """
    total = samples = correct = labelled = 0.0
    with evaluation(model), torch.no_grad(), seeded(0):
        batches = task.eval_batches() if task.eval_batches else islice(TaskBatches(task, device), TRAIN_BATCHES)
        for batch in (move(batch, device) for batch in batches):
            tensors = sample_tensors(batch)
            size = len(tensors[0]) if tensors else 1
            total, samples = total + size * float(task.scalar_loss(model, batch)), samples + size
            hits = _hits(model, batch) if task.eval_batches and task.evaluate is None else None
            if hits is not None:
                correct, labelled = correct + float(hits.sum()), labelled + len(hits)
    found = correct / labelled if labelled else None
    if task.evaluate is not None:
        with evaluation(model):
            found = finite(float(task.evaluate(model)))
    return {"loss": finite(total / samples) if samples else None, "measure": found}


def finite(value: float | None) -> float | None:
    """The value, or None if JSON cannot express it."""
    return value if value is not None and math.isfinite(value) else None


def _hits(model: nn.Module, batch: Any) -> Tensor | None:
    """Which labels agree with the largest class score; None if this is no batch of labels or no table of scores."""
    labels = batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.dtype not in LABELS:
        return None
    output = model(batch[0])
    is_table = isinstance(output, Tensor) and output.ndim == 2 and len(output) == len(labels) and output.shape[1] > 1
    return output.argmax(1) == labels if is_table else None

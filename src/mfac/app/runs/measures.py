"""How well a model does on its task: the loss, and the task's measure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from mfac.app.runs.random_state import aside, seeded
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.tasks import Task
from mfac.gradients.batches import Batch, move, sample_tensors
from mfac.gradients.model_state import evaluation

TRAIN_BATCHES = 8  # the loss is taken over so many where a task has no batches for it


@dataclass(frozen=True)
class Measured:
    """The loss and the task's measure; None where there is no such number, or it is not finite."""

    loss: float | None
    measure: float | None


def measure(task: Task, model: nn.Module, device: torch.device) -> Measured:
    """The loss over the task's held-out batches (or its first training batches) and the task's own measure.

    A task without `evaluate` whose batches are (inputs, labels) and whose model gives class scores is measured by its
    accuracy. The model, its mode and the random state are as before afterwards.
    """
    with aside(), evaluation(model), torch.no_grad():
        loss, accuracy = _over_batches(task, model, device)
    if task.evaluate is None:
        return Measured(loss, accuracy)
    with aside(), evaluation(model):
        return Measured(loss, finite(float(task.evaluate(model))))


def finite(value: float | None) -> float | None:
    """The value, or None where JSON would have no word for it."""
    return value if value is not None and math.isfinite(value) else None


def _over_batches(task: Task, model: nn.Module, device: torch.device) -> tuple[float | None, float | None]:
    losses = weights = right = labelled = 0.0
    with seeded(0):
        for batch in _batches(task, device):
            size = _size(batch)
            losses, weights = losses + size * float(task.loss(model, batch)), weights + size
            if task.evaluate is None and task.eval_batches is not None and (labels := _labels(batch)) is not None:
                hits = _hits(model, batch[0], labels)
                right, labelled = right + (hits or 0), labelled + (0 if hits is None else len(labels))
    return finite(losses / weights) if weights else None, right / labelled if labelled else None


def _batches(task: Task, device: torch.device) -> Iterable[Batch]:
    if task.eval_batches is None:
        return islice(TaskBatches(task, device), TRAIN_BATCHES)
    return (move(batch, device) for batch in task.eval_batches())


def _size(batch: Batch) -> int:
    found = sample_tensors(batch)
    return len(found[0]) if found else 1


def _labels(batch: Batch) -> Tensor | None:
    """The labels of a batch (inputs, labels); None for any other."""
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return None
    labels = batch[1]
    return labels if labels.ndim == 1 and labels.dtype in (torch.int64, torch.int32, torch.uint8) else None


def _hits(model: nn.Module, inputs: Batch, labels: Tensor) -> int | None:
    """How many labels the largest class score agrees with; None where the output is no table of class scores."""
    output = model(inputs)
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(labels) or output.shape[1] < 2:
        return None
    return int((output.argmax(1) == labels).sum())

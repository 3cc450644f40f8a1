"""Evaluation: the loss of a model, and its task's measure."""

import math
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.runs.task_batches import TaskBatches
from mfac.app.tasks import Task
from mfac.gradients.batches import move, sample_tensors
from mfac.gradients.model_state import evaluation, seeded

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
            total, samples = total + size * float(task.loss(model, batch)), samples + size
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
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(labels) or output.shape[1] < 2:
        return None
    return output.argmax(1) == labels

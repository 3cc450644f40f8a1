"""A task: a model, its batches, its loss, and how to evaluate it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class TaskError(ValueError):
    """A task that cannot be used. The message is one line: where, what was expected, and what to do."""


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Random numbers (initial weights, the order of batches) come from the global random states, which a run seeds.

    Args:
        name: shown to people and used in file names.
        model: makes the model.
        train_batches: makes an iterable of batches; one pass over it is an epoch.
        loss: (model, batch) -> scalar.
        evaluate: model -> the measure, for example the accuracy.
        eval_batches: makes held-out batches for the loss; also for the accuracy, if `evaluate` is None and the model
            returns class scores.
        optimizer: parameters -> optimizer, for training between the steps of gradual pruning.
        measure: name of the number that `evaluate` returns.
        higher_is_better: whether a higher measure is a better one.
        source: the file or module that the task was loaded from; "" for a built-in task.
        pretrain: trains a newly made model in place.
    """

    name: str
    model: Callable[[], nn.Module]
    train_batches: Callable[[], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], float] | None = None
    eval_batches: Callable[[], Iterable[Any]] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    measure: str = "accuracy"
    higher_is_better: bool = True
    source: str = ""
    pretrain: Callable[[nn.Module], None] | None = None

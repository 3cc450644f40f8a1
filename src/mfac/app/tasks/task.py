"""What is pruned or trained: a model, its batches, its loss, and how well it does."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn


class TaskError(ValueError):
    """A task that cannot be used: one line that says where, what was expected and what to do."""


@dataclass(frozen=True)
class Task:
    """A model and its data, as every command takes them.

    Random numbers (initial weights, the order of batches) come from torch's global state: whoever runs the task seeds
    it, so that one seed gives one run and another seed another.

    Args:
        name: for people and for the names of files.
        model: makes the model, trained where there is a checkpoint of it.
        train_batches: makes the batches; each pass over what it gives is an epoch, drawn anew.
        loss: (model, batch) -> scalar.
        evaluate: model -> the task's measure, e.g. accuracy in [0, 1].
        eval_batches: held-out batches for the loss (and the accuracy, where `evaluate` is None and the model gives
            class scores).
        optimizer: parameters -> optimizer, for fine-tuning.
        measure: name of what `evaluate` gives.
        higher_is_better: for `measure`.
        source: the file or module that it came from; "" for those that are built in.
        pretrain: trains a model that came fresh from `model`, in place: in seconds as a rule, for GLUE in minutes.
    """

    name: str
    model: Callable[[], nn.Module]
    train_batches: Callable[[], Iterable[Batch]]
    loss: LossFn
    evaluate: Callable[[nn.Module], float] | None = None
    eval_batches: Callable[[], Iterable[Batch]] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    measure: str = "accuracy"
    higher_is_better: bool = True
    source: str = ""
    pretrain: Callable[[nn.Module], None] | None = None

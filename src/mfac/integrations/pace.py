"""When a training loop prunes: after so many optimizer steps, and then again and again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mfac.pruning.gradual import GradualPruner

Build = Callable[[Any, Optimizer], GradualPruner]


@dataclass(frozen=True)
class Pace:
    """The first pruning step after `start` optimizer steps (0: before training), the others `every` so many later.

    Raises:
        ValueError: `every` is below 1 or `start` below 0.
    """

    every: int
    start: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("start", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int of at least {least} (optimizer steps), not {value!r}")

    def due(self, global_step: int) -> int:
        """How many pruning steps should have happened by then."""
        return 0 if global_step < self.start else 1 + (global_step - self.start) // self.every

    def catch_up(self, pruner: GradualPruner, global_step: int) -> None:
        """Takes the pruning steps that are due."""
        while pruner.steps_done < self.due(global_step) and pruner.step() is not None:
            pass


def built(build: Build, model: nn.Module, optimizer: Optimizer, processes: int) -> GradualPruner:
    """The pruner that the user's function makes.

    Raises:
        ValueError: it makes something else, or training runs in several processes.
    """
    if processes > 1:
        raise ValueError(
            f"this callback prunes in one process, and training runs in {processes}: each would choose its own masks; "
            "train on one device, or prune in a loop of your own with mfac.GradualPruner(process_group=...)"
        )
    pruner = build(model, optimizer)
    if not isinstance(pruner, GradualPruner):
        raise ValueError(
            f"build must return an mfac.GradualPruner, not a {type(pruner).__name__}: "
            "build=lambda model, optimizer: mfac.GradualPruner(model, ..., optimizer=optimizer)"
        )
    return pruner

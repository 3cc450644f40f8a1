"""When a training loop prunes: after so many optimizer steps, and then at regular intervals."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mfac.pruning.gradual import GradualPruner

Build = Callable[[Any, Optimizer], GradualPruner]


class PacedPruning:
    """The first pruning step comes after `start` optimizer steps (0: before training), the next ones every `every`.

    `build` makes the pruner once the trainer has its optimizer: `lambda model, optimizer: mfac.GradualPruner(model,
    loss_fn, batches, schedule, optimizer=optimizer)`. Give it its own batches: the trainer's loader is in use.
    """

    def __init__(self, build: Build, every: int, start: int = 0):
        for name, value, least in (("every", every, 1), ("start", start, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int of at least {least} (optimizer steps), not {value!r}")
        self.pruner: GradualPruner | None = None
        self._build, self._every, self._start = build, every, start

    def due(self, global_step: int) -> int:
        """How many pruning steps should have happened by then."""
        return 0 if global_step < self._start else 1 + (global_step - self._start) // self._every

    def catch_up(self, global_step: int) -> None:
        assert self.pruner is not None
        while self.pruner.steps_done < self.due(global_step) and self.pruner.step() is not None:
            pass

    def begin(
        self, model: nn.Module, optimizer: Optimizer, processes: int, global_step: int, saved: Any, remedy: str
    ) -> None:
        """Builds the pruner, or resumes it from its saved state, and takes the steps that are due."""
        if processes > 1:
            raise ValueError(
                f"this callback prunes in one process, and training runs in {processes}; train on one device, or prune "
                "in a loop of your own with mfac.GradualPruner(process_group=...)"
            )
        self.pruner = self._build(model, optimizer)
        if not isinstance(self.pruner, GradualPruner):
            raise ValueError(f"build must return an mfac.GradualPruner, not a {type(self.pruner).__name__}")
        if saved:
            self.pruner.load_state_dict(saved)
        elif global_step and self.due(global_step):
            raise ValueError(f"training resumes at step {global_step} from a checkpoint without the masks; {remedy}")
        self.catch_up(global_step)

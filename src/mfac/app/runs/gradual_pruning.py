"""Gradual pruning of a task: steps of a schedule with epochs of training after each."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.app.runs.task_batches import CountedStream, TaskBatches
from mfac.app.runs.training_loop import TrainingLoop
from mfac.gradients.losses import LossFn
from mfac.pruning.gradual import GradualPruner
from mfac.pruning.result import StepRecord


class GradualPruning:
    """A `GradualPruner` and the training after each of its steps, as one thing that can stop and go on.

    Args:
        model: pruned and trained in place.
        loss_fn: (model, batch) -> scalar.
        stream: the batches that gradients for pruning are taken from.
        batches: what is trained on.
        optimizer: what trains.
        schedule: the sparsities.
        tuning_steps: optimizer steps after each pruning step.
        seed: of the order of batches in training.
        options: all else that `GradualPruner` takes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        stream: CountedStream,
        batches: TaskBatches,
        optimizer: Optimizer,
        schedule: list[float],
        *,
        tuning_steps: int,
        seed: int,
        options: Mapping[str, Any],
    ):
        self.total = len(schedule)
        self._stream, self._tuning_steps = stream, tuning_steps
        self._loss_batches = options["loss_batches"]
        self._pruner = GradualPruner(
            model,
            loss_fn,
            lambda step: stream,
            schedule,
            optimizer=optimizer,
            reset_momentum=True,
            seed=seed,
            **options,
        )
        self._loop = TrainingLoop(model, loss_fn, batches, optimizer, seed=seed)
        self.on_tuning: Callable[[], None] = lambda: None

    @property
    def masks(self) -> dict[str, Tensor]:
        """As they are now."""
        return self._pruner.masks

    @property
    def history(self) -> list[StepRecord]:
        """All recomputations of all steps."""
        return [record for records in self._pruner.history for record in records]

    @property
    def training(self) -> list[dict[str, Any]]:
        """The loss at each step of training."""
        pairs = zip(self._loop.seconds, self._loop.losses, strict=True)
        return [{"step": i, "second": round(second, 4), "loss": loss} for i, (second, loss) in enumerate(pairs, 1)]

    @property
    def steps_done(self) -> float:
        """Pruning steps with the training after them; parts of one count."""
        return min(self._pruner.steps_done, self._loop.step / self._tuning_steps)

    def advance(self) -> bool:
        """Finishes the training of the last step, then prunes to the next sparsity; False at the end.

        Raises:
            RuntimeError: the training diverged.
        """
        self._loop.run(self._pruner.steps_done * self._tuning_steps, self.on_tuning)
        if self._loop.is_diverged:
            raise RuntimeError(
                f"the loss was not finite at step {self._loop.step} of the training between pruning steps; "
                "take a lower learning rate (--lr)"
            )
        return self._pruner.step() is not None

    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs."""
        return {"loop": self._loop.state_dict(), "pruner": self._pruner.state_dict(), "drawn": self._stream.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state."""
        self._loop.load_state_dict(state["loop"])
        self._pruner.load_state_dict(state["pruner"])
        self._stream.resume_at(state["drawn"], self._loss_batches)

"""Gradual pruning inside Lightning's Trainer."""

from typing import Any

from mfac.integrations.pace import Build, Pace, built
from mfac.pruning.gradual import GradualPruner

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("this callback needs lightning; pip install 'torch-mfac[lightning]'") from error


class PruningCallback(Callback):
    """Prunes gradually while Lightning trains; removed weights stay at zero in between.

    The pruner's state is part of every checkpoint, and a run that is resumed goes on with it.

    Args:
        build: makes the pruner once there is an optimizer:
            `lambda module, optimizer: mfac.GradualPruner(module, loss_fn, batches, schedule, optimizer=optimizer)`.
            Its loss_fn gets the LightningModule as the model. Give it batches of its own, not the Trainer's loader.
        every: optimizer steps from one pruning step to the next.
        start: optimizer steps before the first one; 0 prunes before training begins.

    Raises:
        ValueError: when training begins, several processes, more than one optimizer, or a checkpoint without masks.
    """

    def __init__(self, build: Build, every: int, start: int = 0):
        self.pruner: GradualPruner | None = None
        self._build = build
        self._pace = Pace(every, start)
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the pruner, or takes it up again; the first step, if it comes before training."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"gradual pruning follows one optimizer, this module has {len(trainer.optimizers)}; "
                "call GradualPruner.step() in the module itself instead"
            )
        self.pruner = built(self._build, pl_module, trainer.optimizers[0], trainer.world_size)
        if self._saved:
            self.pruner.load_state_dict(self._saved)
            self._saved = {}
        elif trainer.global_step and self._pace.due(trainer.global_step):
            raise ValueError(
                f"training is resumed at step {trainer.global_step} from a checkpoint without masks; "
                "resume from one that was saved with this callback"
            )
        self._pace.catch_up(self.pruner, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Prunes, when it is time."""
        assert self.pruner is not None
        self._pace.catch_up(self.pruner, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """The pruner's state, which Lightning puts into its checkpoints."""
        return {} if self.pruner is None else self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until there is a pruner to take it."""
        self._saved = dict(state_dict)

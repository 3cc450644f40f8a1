"""Gradual pruning in Lightning's Trainer."""

from typing import Any

from mfac.integrations.pace import Build, PacedPruning

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("this callback needs lightning; pip install 'torch-mfac[lightning]'") from error


class PruningCallback(PacedPruning, Callback):
    """Prunes gradually while Lightning trains, as `PacedPruning` says; pruned weights stay at zero in between.

    The pruner's state is part of every checkpoint, and a resumed run continues from it. Its loss_fn gets the
    LightningModule as the model.

    Raises:
        ValueError: when training begins: several processes or optimizers, or a checkpoint without masks.
    """

    def __init__(self, build: Build, every: int, start: int = 0):
        super().__init__(build, every, start)
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"gradual pruning follows one optimizer, this module has {len(trainer.optimizers)}")
        remedy = "resume from one that this callback has saved"
        self.begin(pl_module, trainer.optimizers[0], trainer.world_size, trainer.global_step, self._saved, remedy)
        self._saved = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.catch_up(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.pruner is None else self.pruner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = dict(state_dict)  # until there is a pruner

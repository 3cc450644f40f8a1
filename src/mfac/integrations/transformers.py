"""Gradual pruning inside the Hugging Face Trainer."""

import os
from pathlib import Path
from typing import Any

import torch

from mfac.integrations.pace import Build, Pace, built
from mfac.pruning.atomic_file import replacing
from mfac.pruning.gradual import GradualPruner

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("this callback needs transformers; pip install 'torch-mfac[transformers]'") from error

STATE_FILE = "mfac_pruning.pt"


class PruningCallback(TrainerCallback):
    """Prunes gradually while a `Trainer` trains; removed weights stay at zero in between.

    The pruner's state goes into every checkpoint (`mfac_pruning.pt`), and a run that is resumed goes on with it.

    Args:
        build: makes the pruner once the Trainer has its optimizer:
            `lambda model, optimizer: GradualPruner(model, mfac.model_loss, batches, schedule, optimizer=optimizer)`.
            Give it batches of its own, not the Trainer's loader, which is in use.
        every: optimizer steps from one pruning step to the next.
        start: optimizer steps before the first one; 0 prunes before training begins.
        resume_from: the checkpoint folder of a resumed run, where it is not `output_dir/checkpoint-<step>`.

    Raises:
        ValueError: when training begins, several processes, `load_best_model_at_end`, or a checkpoint without masks.
    """

    def __init__(self, build: Build, every: int, start: int = 0, resume_from: str | os.PathLike[str] | None = None):
        self.pruner: GradualPruner | None = None
        self._build = build
        self._pace = Pace(every, start)
        self._resume_from = resume_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the pruner, or takes it up again; the first step, if it comes before training."""
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True would bring back the weights of an earlier, denser checkpoint; "
                "leave it off while pruning gradually"
            )
        self.pruner = built(self._build, kwargs["model"], kwargs["optimizer"], args.world_size)
        if state.global_step:
            self._resume(self.pruner, Path(self._resume_from or _checkpoint(args, state)), state.global_step)
        self._pace.catch_up(self.pruner, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Prunes, when it is time."""
        assert self.pruner is not None
        self._pace.catch_up(self.pruner, state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Puts the pruner's state beside the model's."""
        assert self.pruner is not None
        with replacing(_checkpoint(args, state) / STATE_FILE) as draft:
            torch.save(self.pruner.state_dict(), draft)

    def _resume(self, pruner: GradualPruner, checkpoint: Path, global_step: int) -> None:
        file = checkpoint / STATE_FILE
        if file.is_file():
            pruner.load_state_dict(torch.load(file, weights_only=True))
        elif self._pace.due(global_step):
            raise ValueError(
                f"training is resumed at step {global_step}, but {file} is not there, and the masks with it; resume "
                "from a checkpoint that has one, or say where it is with PruningCallback(resume_from=...)"
            )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"

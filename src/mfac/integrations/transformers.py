"""Gradual pruning in the Hugging Face Trainer."""

import os
from pathlib import Path
from typing import Any

import torch

from mfac.integrations.pace import Build, PacedPruning
from mfac.pruning.atomic_file import replacing

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("this callback needs transformers; pip install 'torch-mfac[transformers]'") from error

STATE_FILE = "mfac_pruning.pt"


class PruningCallback(PacedPruning, TrainerCallback):
    """Prunes gradually while a `Trainer` trains, as `PacedPruning` says; pruned weights stay at zero in between.

    The pruner's state goes into every checkpoint (`mfac_pruning.pt`), and a resumed run continues from it;
    `resume_from` is the checkpoint folder, if it is not `output_dir/checkpoint-<step>`.

    Raises:
        ValueError: when training begins: several processes, `load_best_model_at_end`, or a checkpoint without masks.
    """

    def __init__(self, build: Build, every: int, start: int = 0, resume_from: str | os.PathLike[str] | None = None):
        super().__init__(build, every, start)
        self._resume_from = resume_from

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        if args.load_best_model_at_end:
            raise ValueError("load_best_model_at_end=True would restore an earlier, denser checkpoint; leave it off")
        pruner = self.begin(kw["model"], kw["optimizer"], args.world_size)
        file = Path(self._resume_from or _checkpoint(args, state)) / STATE_FILE
        if state.global_step and file.is_file():
            pruner.load_state_dict(torch.load(file, weights_only=True))
        elif state.global_step and self.due(state.global_step):
            raise ValueError(
                f"training resumes at step {state.global_step}, but {file} with the masks is missing; resume from a "
                "checkpoint that has it, or say where it is with PruningCallback(resume_from=...)"
            )
        self.catch_up(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self.catch_up(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        assert self.pruner is not None
        with replacing(_checkpoint(args, state) / STATE_FILE) as draft:
            torch.save(self.pruner.state_dict(), draft)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"

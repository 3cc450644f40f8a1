"""Optimizers by name and gradual pruning in the Hugging Face Trainer."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from mfac.full_matrix_adam import FullMatrixAdam
from mfac.integrations.pace import Build, PacedPruning
from mfac.optimizer import MFAC
from mfac.saved import replacing

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("this callback needs transformers; pip install 'torch-mfac[transformers]'") from error

STATE_FILE = "mfac_pruning.pt"
# The class, and what differs from its defaults: the Trainer's weight decay is then decoupled, as in AdamW.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "full_matrix_adam": (FullMatrixAdam, {}),
    "mfac": (MFAC, {"normalize": "sum", "decoupled_weight_decay": True}),
}


def optimizer_by_name(name: str, **options: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=...)` takes: "full_matrix_adam" or "mfac", with options of its class.

    The Trainer builds it on its own parameter groups, with and without `weight_decay`; lr is that of the options.

    Raises:
        ValueError: there is no optimizer of that name, or it has no such option.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}")
    kind, defaults = OPTIMIZERS[name]
    known = inspect.signature(kind).parameters.keys() - {"params"}
    if unknown := options.keys() - known:
        raise ValueError(
            f"{kind.__name__} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
        )
    return kind, defaults | options


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
        file, step = Path(self._resume_from or _checkpoint(args, state)) / STATE_FILE, state.global_step
        try:
            saved = torch.load(file, weights_only=True) if step and file.is_file() else None
        except Exception as error:
            raise ValueError(f"{file} is damaged ({error}); resume from another checkpoint") from error
        remedy = f"there is no {file}: say where it is with PruningCallback(resume_from=...)"
        self.begin(kw["model"], kw["optimizer"], args.world_size, step, saved, remedy)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self.catch_up(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        assert self.pruner is not None
        with replacing(_checkpoint(args, state) / STATE_FILE) as draft:
            torch.save(self.pruner.state_dict(), draft)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"

"""Training runs: several optimizers side by side, from the same weights and with the same batches."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mfac.app.runs.environment import choose_device, process_peak_bytes
from mfac.app.runs.files import load_state, save_state, save_weights
from mfac.app.runs.folder import STATE, Record, RunFolder, open_run
from mfac.app.runs.measures import measure
from mfac.app.runs.optimizers import OptimizerSettings, make_optimizer
from mfac.app.runs.random_state import seeded
from mfac.app.runs.run import Watcher, build_model, check_distinct, check_positive, describe
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.training_loop import TrainingLoop
from mfac.app.tasks import Task

SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run.

    Args:
        optimizers: one cell for each of them and each seed.
        epochs: passes over the data.
        steps: optimizer steps, instead of epochs.
        eval_every: steps between evaluations; by default an epoch, or a tenth of the steps.
        schedule: of the learning rate: cosine (to zero) or constant.
        checkpoint: a state_dict saved by torch.save or safetensors to start from.
        seeds: of initial weights, order of batches and dropout; may be repeated.
        device: where to compute: cpu, cuda, cuda:1 ...
        save_every: seconds between saves during training.
    """

    optimizers: tuple[OptimizerSettings, ...]
    epochs: int = 5
    steps: int | None = None
    eval_every: int | None = None
    schedule: str = "cosine"
    checkpoint: str | None = None
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    save_every: float = 30.0

    def flat(self) -> dict[str, Any]:
        """The settings that determine the result, for run.json."""
        own = {key: value for key, value in asdict(self).items() if key not in ("optimizers", "save_every")}
        each = {f"{o.name}_{key}": value for o in self.optimizers for key, value in o.filled().items()}
        return {"optimizers": [o.name for o in self.optimizers], **own, **each}

    def check(self, task: Task, model: nn.Module) -> None:
        """Raises ValueError for invalid settings."""
        check_distinct(optimizer=tuple(optimizer.name for optimizer in self.optimizers), seed=self.seeds)
        check_positive(self, "epochs", "steps", "eval_every")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be {' or '.join(SCHEDULES)}, not {self.schedule!r}")
        for optimizer in self.optimizers:
            make_optimizer(optimizer, task, model)


def run_training(
    task: Task,
    settings: TrainingSettings,
    path: Path,
    *,
    command: str = "",
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> Record:
    """Trains, or resumes the interrupted run in the folder; returns the record of run.json.

    Raises:
        ValueError: invalid settings, or the folder of another run.
        OSError: a file could not be written; the old one is left in place.
    """
    device = choose_device(settings.device)
    model = build_model(task, device, settings.seeds[0] if settings.seeds else 0, settings.checkpoint)
    settings.check(task, model)
    description = describe("train", command, task, model, device, settings.flat())
    del model
    with open_run(path, description, fresh=fresh) as folder:
        if settings.steps is not None:
            total, every = settings.steps, max(1, settings.steps // 10)
        else:
            every = TaskBatches(task, device).count()
            total = settings.epochs * every
        for seed in settings.seeds:
            for optimizer in settings.optimizers:
                cell = _Cell(task, settings, optimizer, seed, folder, device, watcher or Watcher())
                if not folder.has(optimizer=optimizer.name, seed=seed):
                    folder.add(cell.run(total, settings.eval_every or every))
                cell.state_path.unlink(missing_ok=True)
        if not folder.is_finished:
            folder.finish()
        return folder.record


class _Cell:
    """One optimizer with one seed."""

    def __init__(
        self,
        task: Task,
        settings: TrainingSettings,
        optimizer: OptimizerSettings,
        seed: int,
        folder: RunFolder,
        device: torch.device,
        watcher: Watcher,
    ):
        self.name = f"{optimizer.name}-seed{seed}"
        self.folder = folder.cell_folder(self.name)
        self.state_path = self.folder / STATE
        self.evaluations: list[Record] = []
        self._task, self._settings, self._optimizer, self._seed = task, settings, optimizer, seed
        self._identity, self._device, self._watcher = folder.identity, device, watcher
        self._saved = time.monotonic()

    def run(self, total: int, eval_every: int) -> Record:
        """Trains to the end, from the start or from the saved state; returns the cell of run.json."""
        model = build_model(self._task, self._device, self._seed, self._settings.checkpoint)
        with seeded(self._seed):
            loop = TrainingLoop(
                model,
                self._task.loss,
                TaskBatches(self._task, self._device),
                make_optimizer(self._optimizer, self._task, model),
                seed=self._seed,
                cosine_steps=total if self._settings.schedule == "cosine" else None,
            )
            saved = load_state(self.state_path)
            if saved is not None and saved["run"] == self._identity:
                loop.load_state_dict(saved["loop"])
                self.evaluations = list(saved["evaluations"])
                self._watcher.say(f"{self.name}: resuming after step {loop.step}")
            self._watcher.begin(f"{self._optimizer.name}, seed {self._seed}", total, "steps")
            self._watcher.at(loop.step)
            loop.run(total, lambda: self._after_step(model, loop, loop.step == total, eval_every))
            self._watcher.end()
        save_weights(model, self.folder / "weights.safetensors")
        return self._record(loop)

    def _after_step(self, model: nn.Module, loop: TrainingLoop, is_last: bool, eval_every: int) -> None:
        if is_last or loop.is_diverged or loop.step % eval_every == 0:
            found = measure(self._task, model, self._device)
            self.evaluations.append({"step": loop.step, "second": round(loop.seconds[-1], 4), **asdict(found)})
        loss = loop.losses[-1]
        self._watcher.at(loop.step, "loss not finite" if loss is None else f"loss {loss:.4g}")
        if time.monotonic() - self._saved >= self._settings.save_every:
            state = {"run": self._identity, "loop": loop.state_dict(), "evaluations": self.evaluations}
            save_state(state, self.state_path)
            self._saved = time.monotonic()

    def _record(self, loop: TrainingLoop) -> Record:
        record = {
            "label": self._optimizer.name,
            "optimizer": self._optimizer.name,
            "seed": self._seed,
            "settings": self._optimizer.filled(),
            "steps": loop.step,
            "losses": loop.losses,
            "seconds": [round(second, 4) for second in loop.seconds],
            "evaluations": self.evaluations,
            "seconds_total": round(loop.seconds[-1], 4),
            "peak_bytes": process_peak_bytes(),
            "files": {"weights": f"{self.name}/weights.safetensors"},
        }
        if loop.is_diverged:
            record["stopped"] = f"the loss was not finite at step {loop.step}"
            self._watcher.say(f"{self.name}: stopped, {record['stopped']}; try a lower learning rate")
        return record

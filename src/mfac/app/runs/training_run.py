"""Training of a task by several optimizers side by side, each from the same weights and with the same batches."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mfac.app.runs.description import build_model, describe
from mfac.app.runs.device import choose_device
from mfac.app.runs.environment import process_peak_bytes
from mfac.app.runs.measures import measure
from mfac.app.runs.optimizers import OptimizerSettings, check_optimizer, make_optimizer
from mfac.app.runs.random_state import seeded
from mfac.app.runs.run_folder import STATE, Record, RunFolder, open_run
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.tensor_files import load_state, save_state, save_weights
from mfac.app.runs.training_loop import TrainingLoop
from mfac.app.runs.watcher import Silent, Watcher
from mfac.app.tasks import Task

SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class TrainingSettings:
    """What `mfac train` is told.

    Args:
        optimizers: one cell for each of them and each seed.
        seeds: of initial weights, order of batches and dropout.
        epochs: how long; `steps` wins where it is given.
        steps: how long, in optimizer steps.
        eval_every: steps between evaluations; None: an epoch, or a tenth of `steps`.
        schedule: of the learning rate: "cosine" to zero, or "constant".
        device: where.
        checkpoint: a file to start from, instead of fresh weights.
        save_every: seconds between saves; no part of what the run is.
    """

    optimizers: tuple[OptimizerSettings, ...]
    seeds: tuple[int, ...] = (0,)
    epochs: int = 5
    steps: int | None = None
    eval_every: int | None = None
    schedule: str = "cosine"
    device: str = "cpu"
    checkpoint: str | None = None
    save_every: float = 30.0

    def flat(self) -> dict[str, Any]:
        """All settings that decide the result, as run.json has them."""
        own = {key: value for key, value in asdict(self).items() if key not in ("optimizers", "save_every")}
        each = {f"{o.name}_{key}": value for o in self.optimizers for key, value in o.filled().items()}
        return {"optimizers": [o.name for o in self.optimizers], **own, **each}


def run_training(
    task: Task,
    settings: TrainingSettings,
    path: Path,
    *,
    command: str = "",
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> Record:
    """Trains, or goes on with what an interrupted run in the same folder has left; the record of run.json.

    Raises:
        ValueError: settings that do not fit, or a folder of another run.
        OSError: something could not be written; what was there before still is.
    """
    _check(task, settings)
    device = choose_device(settings.device)
    model = build_model(task, device, settings.seeds[0], settings.checkpoint)
    for optimizer in settings.optimizers:  # a setting out of its range is told before anything is done
        make_optimizer(optimizer, task, model)
    description = describe("train", f"Training of {task.name}", command, task, model, device, settings.flat())
    del model
    with open_run(path, description, fresh=fresh) as folder:
        batches = TaskBatches(task, device)
        an_epoch = None if settings.steps is not None else batches.count()
        for seed in settings.seeds:
            for optimizer in settings.optimizers:
                cell = _Cell(task, settings, optimizer, seed, folder, device, watcher or Silent(), an_epoch)
                if not folder.has(optimizer=optimizer.name, seed=seed):
                    folder.add(cell.run())
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
        an_epoch: int | None,
    ):
        self.name = f"{optimizer.name}-seed{seed}"
        self.folder = folder.cell_folder(self.name)
        self.state_path = self.folder / STATE
        self.evaluations: list[Record] = []
        self._task, self._settings, self._optimizer, self._seed = task, settings, optimizer, seed
        self._identity, self._device, self._watcher = folder.identity, device, watcher
        if settings.steps is not None:
            self.total, every = settings.steps, max(1, settings.steps // 10)
        else:
            assert an_epoch is not None
            self.total, every = settings.epochs * an_epoch, an_epoch
        self._eval_every = settings.eval_every or every
        self._saved = time.monotonic()

    def run(self) -> Record:
        """Trains to the end, from the beginning or from what was saved; the cell of run.json."""
        model = build_model(self._task, self._device, self._seed, self._settings.checkpoint)
        with seeded(self._seed):
            loop = TrainingLoop(
                model,
                self._task.loss,
                TaskBatches(self._task, self._device),
                make_optimizer(self._optimizer, self._task, model),
                seed=self._seed,
                cosine_steps=self.total if self._settings.schedule == "cosine" else None,
            )
            self._restore(loop)
            self._watcher.begin(f"{self._optimizer.name}, seed {self._seed}", self.total, "steps")
            self._watcher.at(loop.step)
            loop.run(self.total, self._after_step(model, loop))
            self._watcher.end()
        save_weights(model, self.folder / "weights.safetensors")
        return self._record(loop)

    def _restore(self, loop: TrainingLoop) -> None:
        saved = load_state(self.state_path)
        if saved is not None and saved["run"] == self._identity:
            loop.load_state_dict(saved["loop"])
            self.evaluations = list(saved["evaluations"])
            self._watcher.say(f"{self.name}: going on after step {loop.step}")

    def _after_step(self, model: nn.Module, loop: TrainingLoop) -> Callable[[], None]:
        def after_step() -> None:
            last = loop.step == self.total or loop.is_diverged
            if last or loop.step % self._eval_every == 0:
                found = measure(self._task, model, self._device)
                self.evaluations.append({"step": loop.step, "second": round(loop.seconds[-1], 4), **asdict(found)})
            self._watcher.at(loop.step, _note(loop.losses[-1]))
            if time.monotonic() - self._saved >= self._settings.save_every:
                save_state(
                    {"run": self._identity, "loop": loop.state_dict(), "evaluations": self.evaluations}, self.state_path
                )
                self._saved = time.monotonic()

        return after_step

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
            self._watcher.say(f"{self.name}: stopped, {record['stopped']}; a lower learning rate may help")
        return record


def _check(task: Task, settings: TrainingSettings) -> None:
    names = [optimizer.name for optimizer in settings.optimizers]
    for name in names:
        check_optimizer(name, task)
    for what, values in (("optimizer", names), ("seed", list(settings.seeds))):
        if not values or len(set(values)) != len(values):
            raise ValueError(f"give one {what} or several, each once, not {', '.join(map(str, values)) or 'none'}")
    for key in ("epochs", "steps", "eval_every"):
        value = getattr(settings, key)
        if value is not None and value < 1:
            raise ValueError(f"{key} must be 1 or more, not {value}")
    if settings.schedule not in SCHEDULES:
        raise ValueError(f"schedule must be {' or '.join(SCHEDULES)}, not {settings.schedule!r}")


def _note(loss: float | None) -> str:
    return "loss not finite" if loss is None else f"loss {loss:.4g}"

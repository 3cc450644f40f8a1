"""Runs: pruning or training a task in a folder, saved as it goes, so that an interrupted run can be resumed."""

import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from mfac.app.runs.environment import choose_device, environment
from mfac.app.runs.files import load_checkpoint, load_state, save_state
from mfac.app.runs.folder import STATE, Record, RunFolder, open_run
from mfac.app.runs.random_state import seeded
from mfac.app.tasks import Task

if TYPE_CHECKING:
    from mfac.app.runs.pruning import Gradual, OneShot, PruningSettings
    from mfac.app.runs.training import Training, TrainingSettings

    Settings: TypeAlias = PruningSettings | TrainingSettings
    Work: TypeAlias = Gradual | OneShot | Training  # in steps; `advance` takes one, and is False at the end


class Watcher:
    """Is told where a run is. This one ignores it; a display overrides the methods."""

    def begin(self, what: str, total: float) -> None:
        """A piece of work of `total` steps begins."""

    def at(self, done: float, note: str = "") -> None:
        """So many steps are done."""

    def end(self) -> None:
        """The piece of work is complete."""

    def say(self, line: str) -> None:
        """A message for the user."""


def run_task(
    task: Task,
    settings: "Settings",
    path: Path,
    *,
    command: str = "",
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> Record:
    """Prunes or trains, as the settings say, or resumes the interrupted run in the folder; the record of run.json.

    Raises:
        ValueError: invalid settings, a checkpoint of another model, or the folder of another run.
        OSError: a file could not be written; the old one is left in place.
    """
    device = choose_device(settings.device)
    model = build_model(task, device, (*settings.seeds, 0)[0], settings.checkpoint)
    settings.check(task, model)
    with open_run(path, _describe(task, settings, command, model, device), fresh=fresh) as folder:
        if not folder.is_finished:
            settings.carry_out(Run(task, folder, device, watcher or Watcher()), model)
            folder.finish()
        return folder.record


def build_model(task: Task, device: torch.device, seed: int, checkpoint: str | None) -> nn.Module:
    """The task's model on the device, initialized with the seed, or with the weights of a checkpoint."""
    with seeded(seed):
        model = task.model()
    if checkpoint is not None:
        load_checkpoint(Path(checkpoint), model)
    return model.to(device)


@dataclass(frozen=True)
class Run:
    """A run in its folder."""

    task: Task
    folder: RunFolder
    device: torch.device
    watcher: Watcher

    def cell(
        self,
        name: str,
        facts: Record,
        *,
        seed: int,
        save_every: float,
        make: Callable[[], "Work"],
        results: Callable[[Any, Path], Record],
    ) -> None:
        """Completes a cell, unless it is complete: its work, and its entry {**facts, **results} in run.json."""
        path = self.folder.cell_folder(name)
        if not self.folder.has(**facts):
            with seeded(seed):
                work = make()
                self._finish(work, path, save_every)
                self.folder.add({**facts, **results(work, path)})
        (path / STATE).unlink(missing_ok=True)

    def _finish(self, work: "Work", path: Path, save_every: float) -> None:
        saved = load_state(path / STATE)
        if saved is not None:
            work.load_state_dict(saved)
            self.watcher.say(f"{path.name}: resuming after {work.done:.3g} of {work.total} steps")
        self.watcher.begin(path.name, work.total)
        self.watcher.at(work.done)
        last_save = time.monotonic()
        while work.advance():
            if work.is_milestone or time.monotonic() - last_save >= save_every:
                save_state(work.state_dict(), path / STATE)
                last_save = time.monotonic()
            self.watcher.at(work.done, work.note)
        self.watcher.end()


def check_distinct(**given: tuple[Any, ...]) -> None:
    """Raises ValueError if there is none of something, or one of them twice."""
    for what, values in given.items():
        if not values or len(set(values)) != len(values):
            listed = ", ".join(map(str, values)) or "none"
            raise ValueError(f"give at least one {what}, without repeats, not {listed}")


def check_settings(settings: "Settings", counts: tuple[str, ...], schedules: Collection[str]) -> None:
    """Raises ValueError if one of these counts is below 1 (None is fine), or the schedule is not one of these."""
    for name in counts:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    if settings.schedule not in schedules:
        raise ValueError(f"schedule must be one of {', '.join(schedules)}, not {settings.schedule!r}")


def _describe(task: Task, settings: "Settings", command: str, model: nn.Module, device: torch.device) -> Record:
    """The entries of run.json that identify a run."""
    files = {"the task": _task_file(task), "the checkpoint": settings.checkpoint}
    parameters = list(model.parameters())
    return {
        "kind": settings.kind,
        "command": command,
        "title": f"{'Pruning' if settings.kind == 'prune' else 'Training'} of {task.name}",
        "task": {key: getattr(task, key) for key in ("name", "measure", "higher_is_better", "source")},
        "model": {"weights": sum(tensor.numel() for tensor in parameters), "tensors": len(parameters)},
        "environment": environment(device),
        "settings": json.loads(json.dumps(settings.flat())),  # as it is read back: lists, no tuples
        "digests": {what: hashlib.sha256(Path(file).read_bytes()).hexdigest() for what, file in files.items() if file},
    }


def _task_file(task: Task) -> str | None:
    if not task.source or task.source.endswith(".py"):
        return task.source or None
    found = importlib.util.find_spec(task.source)
    return None if found is None else found.origin

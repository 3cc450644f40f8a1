"""Runs: pruning or training a task in a folder, saved as it goes, so that an interrupted run can be resumed."""

import hashlib
import importlib.util
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from mfac.app.runs.environment import choose_device, environment
from mfac.app.runs.folder import STATE, Record, RunFolder, inside, load_checkpoint, now, open_run, read_torch, writing
from mfac.app.tasks import Task
from mfac.gradients.model_state import seeded

if TYPE_CHECKING:
    from mfac.app.runs.pruning import PruningSettings
    from mfac.app.runs.training import TrainingSettings

    Settings: TypeAlias = PruningSettings | TrainingSettings


class Watcher:
    """Is told where a run is, and what to tell the user; this one ignores it, a display overrides the methods."""

    def begin(self, what: str, total: float) -> None: ...
    def at(self, done: float, note: str = "") -> None: ...
    def end(self) -> None: ...
    def say(self, line: str) -> None: ...


def run_task(
    task: Task, settings: "Settings", path: Path, command: str = "", fresh: bool = False, watcher: Watcher | None = None
) -> Record:
    """Prunes or trains, as the settings say, or resumes the interrupted run in the folder; the record of run.json."""
    device = choose_device(settings.device)
    model = build_model(task, device, (*settings.seeds, 0)[0], settings.checkpoint)
    settings.check(task, model)
    with open_run(path, _describe(task, settings, command, model, device), fresh=fresh) as folder:
        if folder.record["finished"] is None:
            settings.carry_out(Run(task, folder, device, watcher or Watcher(), settings.save_every), model)
            folder.put(finished=now())
        return folder.record


def build_model(task: Task, device: torch.device, seed: int, checkpoint: str | None) -> nn.Module:
    """The task's model on the device, initialized with the seed, or with the weights of a checkpoint."""
    with seeded(seed):
        model = task.model()
    if checkpoint is not None:
        load_checkpoint(Path(checkpoint), model)
    return model.to(device)


class Run:
    """A run in its folder, cell by cell (`name`): one method at one sparsity, or one optimizer with one seed."""

    def __init__(self, task: Task, folder: RunFolder, device: torch.device, watcher: Watcher, save_every: float):
        self.task, self.folder, self.device, self.watcher, self.name = task, folder, device, watcher, ""
        self._save_every, self._last_save, self._parts = save_every, 0.0, dict[str, Any]()

    def cell(self, name: str, facts: Record, seed: int, work: Callable[["Run"], Record]) -> None:
        """Completes a cell, unless it is complete; its entry in run.json is the facts and what `work` returns."""
        inside(self.folder.path, name).mkdir(exist_ok=True)
        self.name, self._last_save = name, time.monotonic()
        if not any(facts.items() <= cell.items() for cell in self.folder.record["cells"]):
            with seeded(seed):
                self.folder.add({**facts, **work(self)})
        self.file(STATE).unlink(missing_ok=True)

    def file(self, name: str) -> Path:
        return inside(self.folder.path, f"{self.name}/{name}")

    def begin(self, total: int, done: Callable[[], float], **parts: Any) -> None:
        """Restores these parts (they have `state_dict` and `load_state_dict`) if there is a state; `at` saves them."""
        self._parts = parts
        if (file := self.file(STATE)).exists():
            try:
                state = read_torch(file)
                for name, part in parts.items():
                    part.load_state_dict(state[name])
            except Exception as error:
                problem = f"{file} is damaged, or not the state of this cell"
                raise ValueError(f"{problem}; delete it, and the same command starts the cell over") from error
            self.watcher.say(f"{self.name}: resuming after {done():.3g} of {total} steps")
        self.watcher.begin(self.name, total)
        self.watcher.at(done())

    def at(self, done: float, note: str, save: bool = False) -> None:
        """So many steps are done; the state is saved if the last save is long ago, or `save`."""
        if save or time.monotonic() - self._last_save >= self._save_every:
            with writing(self.file(STATE)) as draft, open(draft, "wb") as file:
                torch.save({name: part.state_dict() for name, part in self._parts.items()}, file)
            self._last_save = time.monotonic()
        self.watcher.at(done, note)


def check_settings(settings: "Settings", counts: tuple[str, ...], **several: tuple[Any, ...]) -> None:
    """Raises ValueError for counts below 1 (None is fine), non-finite numbers, and values missing or given twice."""
    for what, values in several.items():
        if not values or len(set(values)) != len(values):
            listed = ", ".join(map(str, values)) or "none"
            raise ValueError(f"give at least one {what}, without repeats, not {listed}")
    for name in counts:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    for name, value in settings.flat().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, not {value}")


def refuse(settings: "Settings", when: bool, names: tuple[str, ...], reason: str) -> None:
    """Raises ValueError `when` settings that are not at their defaults would have no effect."""
    changed = [name for name in names if getattr(settings, name) != getattr(type(settings), name)]
    if when and changed:
        raise ValueError(f"{', '.join(changed)}: {reason}")


def _describe(task: Task, settings: "Settings", command: str, model: nn.Module, device: torch.device) -> Record:
    found = importlib.util.find_spec(task.source) if task.source and not task.source.endswith(".py") else None
    files = {"the task": found.origin if found else task.source, "the checkpoint": settings.checkpoint}
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

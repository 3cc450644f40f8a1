"""What pruning runs and training runs share: their description, the model to start from, and who watches."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mfac.app.runs.environment import environment
from mfac.app.runs.files import load_checkpoint
from mfac.app.runs.folder import Record
from mfac.app.runs.random_state import seeded
from mfac.app.tasks import Task


class Watcher:
    """Is told where a run is. This one ignores it; a display overrides the methods."""

    def begin(self, what: str, total: float, unit: str) -> None:
        """A piece of work of `total` units begins."""

    def at(self, done: float, note: str = "") -> None:
        """So many units are done."""

    def end(self) -> None:
        """The piece of work is complete."""

    def say(self, line: str) -> None:
        """A message for the user."""


def describe(kind: str, command: str, task: Task, model: nn.Module, device: torch.device, settings: Record) -> Record:
    """The entries of run.json that identify a run; `settings` are flat, and everything that the result depends on."""
    parameters = list(model.parameters())
    checkpoint = settings.get("checkpoint")
    files = {"the task": _task_file(task), "the checkpoint": None if checkpoint is None else Path(checkpoint)}
    return {
        "kind": kind,
        "command": command,
        "title": f"{'Pruning' if kind == 'prune' else 'Training'} of {task.name}",
        "task": {key: getattr(task, key) for key in ("name", "measure", "higher_is_better", "source")},
        "model": {"weights": sum(tensor.numel() for tensor in parameters), "tensors": len(parameters)},
        "environment": environment(device),
        "settings": json.loads(json.dumps(settings)),  # as it is read back: lists, no tuples
        "digests": {what: _digest(path) for what, path in files.items() if path is not None and path.is_file()},
    }


def build_model(task: Task, device: torch.device, seed: int, checkpoint: str | None) -> nn.Module:
    """The task's model on the device, initialized with the seed, or with the weights of a checkpoint."""
    with seeded(seed):
        model = task.model()
    if checkpoint is not None:
        load_checkpoint(Path(checkpoint), model)
    return model.to(device)


def check_distinct(**given: tuple[Any, ...]) -> None:
    """Raises ValueError if there is none of something, or one twice."""
    for what, values in given.items():
        if not values or len(set(values)) != len(values):
            listed = ", ".join(map(str, values)) or "none"
            raise ValueError(f"give at least one {what}, without repeats, not {listed}")


def check_positive(settings: object, *names: str) -> None:
    """Raises ValueError if one of these settings is below 1; None is fine."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _task_file(task: Task) -> Path | None:
    if not task.source or task.source.endswith(".py"):
        return Path(task.source) if task.source else None
    found = importlib.util.find_spec(task.source)
    return None if found is None or found.origin is None else Path(found.origin)

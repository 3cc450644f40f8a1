"""What a run is, before it begins: the entries of run.json that say which run it is."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mfac.app.runs.checkpoint import load_checkpoint
from mfac.app.runs.environment import environment
from mfac.app.runs.random_state import seeded
from mfac.app.runs.run_folder import Record, file_digest
from mfac.app.tasks import Task


def describe(
    kind: str, title: str, command: str, task: Task, model: nn.Module, device: torch.device, settings: Mapping[str, Any]
) -> Record:
    """The record of a run that has not begun; `settings` are flat, and all that the result depends on."""
    parameters = list(model.parameters())
    return {
        "kind": kind,
        "command": command,
        "title": title,
        "task": {
            "name": task.name,
            "measure": task.measure,
            "higher_is_better": task.higher_is_better,
            "source": task.source,
        },
        "model": {"weights": sum(tensor.numel() for tensor in parameters), "tensors": len(parameters)},
        "environment": environment(device),
        "settings": json.loads(json.dumps(dict(settings))),  # as it is read back: lists, no tuples
        "digests": _digests(task, settings.get("checkpoint")),
    }


def build_model(task: Task, device: torch.device, seed: int, checkpoint: str | None) -> nn.Module:
    """The task's model on the device, initialised from the seed where that matters, or filled from a checkpoint.

    Raises:
        ValueError: the checkpoint does not fit.
    """
    with seeded(seed):
        model = task.model()
    if checkpoint is not None:
        load_checkpoint(Path(checkpoint), model)
    return model.to(device)


def _digests(task: Task, checkpoint: str | None) -> dict[str, str]:
    """{what: digest} of the files that a run depends on: one whose task has been changed since is another run."""
    files = {"the task": _task_file(task), "the checkpoint": None if checkpoint is None else Path(checkpoint)}
    return {what: file_digest(path) for what, path in files.items() if path is not None and path.is_file()}


def _task_file(task: Task) -> Path | None:
    if not task.source or task.source.endswith(".py"):
        return Path(task.source) if task.source else None
    found = importlib.util.find_spec(task.source)
    return None if found is None or found.origin is None else Path(found.origin)

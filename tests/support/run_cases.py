"""A small task, watchers that stop a run, and runs that kill themselves."""

import errno
import json
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mfac.app.runs.pruning import PruningSettings
from mfac.app.runs.run import Watcher, run_task
from mfac.app.runs.training import OptimizerSettings, TrainingSettings
from mfac.app.tasks import Task
from mfac.pruning.options import PruningOptions

ONE_SHOT = PruningSettings(PruningOptions(recomputations=4, num_grads=8, block_size=16), sparsities=(0.8,))
QUICK = PruningOptions(recomputations=2, num_grads=8, block_size=16)
GRADUAL = PruningSettings(QUICK, sparsities=(0.8,), gradual=True, steps=3, save_every=0)
OPTIMIZERS = OptimizerSettings("full-matrix-adam", num_grads=4), OptimizerSettings("adam")
TRAINING = TrainingSettings(optimizers=OPTIMIZERS, epochs=3, save_every=0)
TIMES = ("started", "finished", "seconds", "gradient_seconds", "seconds_total", "second", "peak_bytes")


def data():
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, (inputs[:, :3] + inputs[:, 3:6]).argmax(1))


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def small_task(**changes):
    parts = {
        "name": "small",
        "model": network,
        "train_batches": lambda: DataLoader(data(), batch_size=8, shuffle=True),
        "loss": loss,
        "eval_batches": lambda: DataLoader(data(), batch_size=32),
    }
    return Task(**parts | changes)


def run(folder, settings, task=None, **options):
    return run_task(task or small_task(), settings, Path(folder), **options)


def with_options(settings, sparsities=(0.8,), **options):
    return replace(settings, sparsities=sparsities, options=replace(settings.options, **options))


class StopAfter(Watcher):
    """Ctrl-C after so many reports of where the run is."""

    def __init__(self, calls=-1, act=None):
        self.left, self.lines, self.act = calls, [], act

    def at(self, done, note=""):
        self.left -= 1
        if self.left == 0:
            if self.act is not None:
                self.act()
            raise KeyboardInterrupt

    def say(self, line):
        self.lines.append(line)


def without_times(record):
    """The record as JSON, without times and memory."""
    text = json.dumps(record)
    return json.loads(text, object_pairs_hook=lambda pairs: {key: item for key, item in pairs if key not in TIMES})


def tensor_bytes(folder):
    """Every tensor that a run leaves in its files, to the bit."""
    return {
        f"{path.relative_to(folder)} {name}": tensor.numpy().tobytes()
        for path in sorted(Path(folder).rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@contextmanager
def full_disk(monkeypatch, after):
    """The disk is full from the so-many-th file on."""
    real, left = os.fsync, [after]

    def full(handle):
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield


def killed_run(folder):
    run(folder, ONE_SHOT, watcher=StopAfter(14, lambda: os.kill(os.getpid(), signal.SIGKILL)))

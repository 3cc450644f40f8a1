"""A small task, listeners that stop a run, and a run that kills itself: `python run_cases.py kind folder calls`."""

import errno
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mfac.app.runs.optimizers import OptimizerSettings
from mfac.app.runs.pruning_run import run_pruning
from mfac.app.runs.pruning_settings import PruningSettings
from mfac.app.runs.training_run import TrainingSettings, run_training
from mfac.app.runs.watcher import Silent
from mfac.app.tasks import Task
from mfac.pruning import atomic_file

ONE_SHOT = PruningSettings(sparsities=(0.8,), recomputations=4, num_grads=8, block_size=16)
GRADUAL = PruningSettings(
    sparsities=(0.8,), recomputations=2, num_grads=8, block_size=16, gradual=True, steps=3, save_every=0
)
TRAINING = TrainingSettings(
    optimizers=(OptimizerSettings("mfac", num_grads=4, momentum=0.5), OptimizerSettings("adam")), epochs=3, save_every=0
)


def data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(96, 8, generator=generator)
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


class StopAfter(Silent):
    """Ctrl-C after so many reports of where the run is."""

    def __init__(self, calls, act=None):
        self.left, self.lines, self.act = calls, [], act

    def at(self, done, note=""):
        self.left -= 1
        if self.left == 0:
            if self.act is not None:
                self.act()
            raise KeyboardInterrupt

    def say(self, line):
        self.lines.append(line)


def tensor_bytes(folder):
    """Every tensor that a run leaves in its files, to the bit; the header's order is the format's own affair."""
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
        patch.setattr(atomic_file.os, "fsync", full)
        yield


def start(kind, folder, watcher=None):
    if kind == "train":
        return run_training(small_task(), TRAINING, Path(folder), watcher=watcher)
    return run_pruning(small_task(), ONE_SHOT if kind == "prune" else GRADUAL, Path(folder), watcher=watcher)


if __name__ == "__main__":
    torch.set_num_threads(1)
    start(sys.argv[1], sys.argv[2], StopAfter(int(sys.argv[3]), lambda: os.kill(os.getpid(), signal.SIGKILL)))

"""Handwritten digits of 8 x 8 pixels, which scikit-learn brings along: the task that needs no download."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.tasks.classification import accuracy, cross_entropy, train
from mfac.app.tasks.task import Task, TaskError
from mfac.app.tasks.tensor_batches import TensorBatches

BATCH_SIZE = 32


def digits() -> Task:
    """A network of 17,226 weights on 1,437 digits; every fifth of the 1,797 is held out."""
    return Task(
        name="digits",
        model=_network,
        train_batches=_train_batches,
        loss=cross_entropy,
        evaluate=lambda model: accuracy(model, _held_out()),
        eval_batches=_held_out,
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        pretrain=lambda model: train(model, _train_batches(), epochs=15, lr=3e-3),
    )


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _train_batches() -> TensorBatches:
    images, labels = _read()
    kept = torch.arange(len(images)) % 5 != 0
    return TensorBatches(images[kept], labels[kept], BATCH_SIZE, shuffle=True)


def _held_out() -> TensorBatches:
    images, labels = _read()
    return TensorBatches(images[::5], labels[::5], 360)


@cache
def _read() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TaskError("the task digits needs scikit-learn: pip install 'torch-mfac[demo]'") from None
    data: Any = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)

"""The built-in task: scikit-learn's handwritten digits of 8 x 8 pixels, which need no download.

A network of 17,226 weights on 1,437 digits; every fifth of the 1,797 is held out.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.tasks.classification import accuracy, cross_entropy, train
from mfac.app.tasks.task import TaskError

BATCH_SIZE = 32
loss = cross_entropy


def model() -> nn.Sequential:
    """The network, with new weights."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class ShuffledBatches:
    """The training digits in whole batches, in a new order in every pass."""

    def __init__(self) -> None:
        images, labels = _read()
        kept = torch.arange(len(images)) % 5 != 0
        self._images, self._labels = images[kept], labels[kept]

    def __len__(self) -> int:
        return len(self._images) // BATCH_SIZE

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self._images)).split(BATCH_SIZE)[: len(self)]:
            yield self._images[chosen], self._labels[chosen]


train_batches = ShuffledBatches


def eval_batches() -> list[tuple[Tensor, Tensor]]:
    """The held-out digits, in one batch."""
    images, labels = _read()
    return [(images[::5], labels[::5])]


def evaluate(model: nn.Module) -> float:
    """The accuracy on the held-out digits."""
    return accuracy(model, eval_batches())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
    """For fine-tuning."""
    return torch.optim.Adam(parameters, lr=1e-3)


def pretrain(model: nn.Module) -> None:
    """Trains a new network to about 96 %."""
    train(model, train_batches(), epochs=15, lr=3e-3)


@cache
def _read() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TaskError("the task digits requires scikit-learn: pip install 'torch-mfac[demo]'") from None
    data: Any = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)

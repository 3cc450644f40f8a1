"""The tasks on public images: MNIST, Fashion-MNIST and CIFAR-10."""

from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mfac.app.datasets.folder import data_folder, find
from mfac.app.datasets.images import HALVES, Normalisation, crop_and_flip, load_cifar10, load_mnist
from mfac.app.datasets.tensor_batches import TensorBatches
from mfac.app.tasks.classification import accuracy, cross_entropy, train
from mfac.app.tasks.resnet import ResNet, load_checkpoint
from mfac.app.tasks.task import Task

BATCH_SIZE = 128
# The mean and the deviation of all pixels of the training images.
PIXELS = {
    "mnist": Normalisation((0.1307,), (0.3081,)),
    "fashion-mnist": Normalisation((0.2860,), (0.3530,)),
}


def mnist(name: str = "mnist") -> Task:
    """LeNet-300-100, 266,610 weights, on the 60,000 digits of MNIST (or the clothes of Fashion-MNIST)."""

    def train_batches() -> TensorBatches:
        return TensorBatches(*_read(name, "train", data_folder()), BATCH_SIZE, shuffle=True, prepare=PIXELS[name])

    def test_batches() -> TensorBatches:
        return TensorBatches(*_read(name, "test", data_folder()), 1000, prepare=PIXELS[name])

    return Task(
        name=name,
        model=_lenet,
        train_batches=train_batches,
        loss=cross_entropy,
        evaluate=lambda model: accuracy(model, test_batches()),
        eval_batches=test_batches,
        optimizer=partial(torch.optim.Adam, lr=5e-4),
        pretrain=lambda model: train(model, train_batches(), epochs=4, lr=1e-3),
    )


def cifar10_resnet20() -> Task:
    """The M-FAC authors' trained ResNet20, 272,474 weights, on CIFAR-10: 91.4 % as it comes."""
    return Task(
        name="cifar10-resnet20",
        model=_resnet20,
        train_batches=_cifar10_train,
        loss=cross_entropy,
        evaluate=lambda model: accuracy(model, _cifar10_test()),
        eval_batches=_cifar10_test,
        optimizer=partial(torch.optim.SGD, lr=0.005, momentum=0.9),
    )


def _lenet() -> nn.Sequential:
    layers = (nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def _resnet20() -> ResNet:
    checkpoint = find("resnet20", "checkpoints", "mfac_resnet20_cifar10.pth.tar")
    return load_checkpoint(ResNet(20, projection=True), checkpoint)


def _cifar10_train() -> TensorBatches:
    images, labels = _read("cifar10", "train", data_folder())
    return TensorBatches(images, labels, BATCH_SIZE, shuffle=True, prepare=lambda pixels: HALVES(crop_and_flip(pixels)))


def _cifar10_test() -> TensorBatches:
    return TensorBatches(*_read("cifar10", "test", data_folder()), 500, prepare=HALVES)


@cache
def _read(name: str, split: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Read once for each folder, which is asked for only so that another MFAC_DATA is another answer."""
    return load_cifar10(split) if name == "cifar10" else load_mnist(split, name)

"""LeNet-300-100 on MNIST or Fashion-MNIST."""

from functools import partial

import torch
from torch import nn

from experiments.data import ImageBatches, accuracy
from experiments.datasets.images import Normalisation, load_mnist
from experiments.models.mlp import LENET, mlp
from experiments.training import Training, cosine, cross_entropy
from mfac.app.tasks import Task

BATCH_SIZE = 128
# Mean and standard deviation of all pixels of the training images.
PIXELS = {"mnist": Normalisation((0.1307,), (0.3081,)), "fashion-mnist": Normalisation((0.2860,), (0.3530,))}


def lenet_task(name: str) -> Task:
    """LeNet-300-100, 266,610 weights, on the 60,000 images of "mnist" or "fashion-mnist"."""

    def train_batches() -> ImageBatches:
        return ImageBatches(*load_mnist("train", name), BATCH_SIZE, PIXELS[name], shuffle=True)

    def eval_batches() -> ImageBatches:
        return ImageBatches(*load_mnist("test", name), 1000, PIXELS[name])

    def pretrain(model: nn.Module) -> None:
        """Four epochs of Adam."""
        batches, optimizer = train_batches(), torch.optim.Adam(model.parameters(), lr=1e-3)
        Training(model, optimizer, batches, 4 * len(batches), cosine).run()
        model.eval()

    return Task(
        name=name,
        model=lambda: mlp(LENET),
        train_batches=train_batches,
        loss=cross_entropy,
        evaluate=lambda model: accuracy(model, eval_batches()),
        eval_batches=eval_batches,
        optimizer=partial(torch.optim.Adam, lr=5e-4),
        pretrain=pretrain,
    )

"""The M-FAC authors' trained ResNet20, 272,474 weights, on CIFAR-10: 91.4 % accuracy before pruning."""

from functools import partial

import torch
from torch import nn

from experiments.data import ImageBatches, accuracy
from experiments.datasets.images import HALVES, load_cifar10
from experiments.models.resnet import mfac_resnet20
from experiments.training import cross_entropy

model, loss = mfac_resnet20, cross_entropy
optimizer = partial(torch.optim.SGD, lr=0.005, momentum=0.9)


def train_batches() -> ImageBatches:
    return ImageBatches(*load_cifar10("train"), 128, HALVES, shuffle=True, augment=True)


def eval_batches() -> ImageBatches:
    return ImageBatches(*load_cifar10("test"), 500, HALVES)


def evaluate(model: nn.Module) -> float:
    return accuracy(model, eval_batches())

"""CIFAR-10 in memory, read once, and a small untrained network to try recipes out on."""

from functools import cache

import torch
from torch import Tensor

from experiments.data import load_cifar10
from experiments.models.resnet import ResNet


@cache
def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """(images, labels) of "train" or "test"; not to be written to."""
    return load_cifar10(split)


def untrained_resnet8() -> ResNet:
    """78,000 weights, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResNet(8).to(memory_format=torch.channels_last).eval()

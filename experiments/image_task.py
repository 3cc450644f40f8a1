"""What the pruning recipes work on: the trained ResNet20 on CIFAR-10; in smoke tests an untrained ResNet8."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments import data
from experiments.models.resnet import ResNet, mfac_resnet20


class ImageTask(NamedTuple):
    """How to make a trained model, its training batches of (size, seed), and its test."""

    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Any]
    test: Callable[[nn.Module], dict[str, float]]


def resnet20_task(test_images: int, *, augment: bool = True, tiny: bool = False) -> ImageTask:
    return ImageTask(
        untrained_resnet8 if tiny else mfac_resnet20,
        lambda size, seed: data.cifar_batches(size, data.HALVES, seed, augment),
        data.make_test(data.HALVES, test_images),
    )


def untrained_resnet8() -> ResNet:
    """78,000 weights, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResNet(8).to(memory_format=torch.channels_last).eval()

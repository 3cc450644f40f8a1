"""Batches of public images for the recipes; the files themselves are read by `experiments.datasets`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from experiments.datasets.folder import data_folder
from experiments.datasets.images import CIFAR10, HALVES, IMAGENET, Normalisation, crop_and_flip, load_cifar10

__all__ = [
    "CIFAR10",
    "HALVES",
    "IMAGENET",
    "ImageBatches",
    "Normalisation",
    "accuracy",
    "crop_and_flip",
    "data_folder",
    "find",
    "load_cifar10",
]


def find(*parts: str) -> Path:
    """A file under the data folder; FileNotFoundError says what belongs there."""
    path = data_folder().joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; put the public files under {data_folder()}, or set MFAC_DATA")
    return path


class ImageBatches:
    """Batches (normalised images, labels), anew in each pass: shuffled and augmented by a seed, or in order.

    Args:
        images: uint8 [n, channels, height, width].
        labels: int64 [n].
        batch_size: of every batch; a smaller last one is left out where batches are shuffled.
        normalisation: of the pixels.
        seed: of the order and of the augmentation; None: in order. A second pass is drawn anew.
        augment: crop and flip.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        normalisation: Normalisation,
        *,
        seed: int | None = None,
        augment: bool = False,
    ):
        self.images, self.labels = images, labels
        self.batch_size, self.normalisation, self.augment = batch_size, normalisation, augment
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        if augment and self.generator is None:
            raise ValueError("augmentation draws random numbers; give a seed")

    def __len__(self) -> int:
        return len(self.images) // self.batch_size if self.generator else -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.images))
        if self.generator is not None:
            order = torch.randperm(len(self.images), generator=self.generator)
        for i in range(len(self)):
            chosen = order[i * self.batch_size : (i + 1) * self.batch_size]
            images = self.images[chosen]
            if self.augment:
                images = crop_and_flip(images, self.generator)
            yield self.normalisation(images), self.labels[chosen]


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches: ImageBatches) -> float:
    """The percentage of images whose class the model gets right, in eval mode; the mode is as before afterwards."""
    training = model.training
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)
    model.train(training)
    return 100 * right / len(batches.images)

"""Images for the recipes: batches by seed, and accuracy on the test images."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets.folder import data_folder
from experiments.datasets.images import CIFAR10, HALVES, IMAGENET, Normalisation, crop_and_flip, load_cifar10
from mfac.gradients.model_state import evaluation

__all__ = ["CIFAR10", "HALVES", "IMAGENET", "ImageBatches", "accuracy", "cifar10", "data_folder", "load_cifar10"]

cifar10 = cache(load_cifar10)  # not to be written to


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 images [n, 64] from 0 to 1, and their labels; not to be written to."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    return images.float() / 16, labels.long()


class ImageBatches:
    """Batches (normalised images, labels) of uint8 images [n, channels, height, width], in order or shuffled.

    With a seed, or with `shuffle` from torch's global random state, the order is new in each pass, and so is the
    augmentation (crop and flip); a smaller last batch is left out then.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, batch_size: int, normalisation: Normalisation, *,
        seed: int | None = None, shuffle: bool = False, augment: bool = False,
    ):  # fmt: skip
        self.images, self.labels = images, labels
        self.batch_size, self.normalisation, self.augment = batch_size, normalisation, augment
        self.shuffle = shuffle or seed is not None
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.images), self.batch_size)
        return whole + bool(rest and not self.shuffle)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images)
        order = torch.randperm(count, generator=self.generator) if self.shuffle else torch.arange(count)
        for i in range(len(self)):
            chosen = order[i * self.batch_size : (i + 1) * self.batch_size]
            images = self.images[chosen]
            if self.augment:
                images = crop_and_flip(images, self.generator)
            yield self.normalisation(images), self.labels[chosen]


def cifar_batches(size: int, normalisation: Normalisation, seed: int, augment: bool = True) -> ImageBatches:
    return ImageBatches(*cifar10("train"), size, normalisation, seed=seed, augment=augment)


def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The fraction of samples classified correctly, in eval mode; the mode is restored."""
    device = next(model.parameters()).device
    with evaluation(model), torch.no_grad():
        hits = [model(inputs.to(device)).argmax(1) == labels.to(device) for inputs, labels in batches]
    return float(torch.cat(hits).double().mean())


def make_test(
    normalisation: Normalisation, count: int | None = None, load: Callable[[str], Any] = cifar10
) -> Callable[[nn.Module], dict[str, float]]:
    """model -> its accuracy on the first `count` test images."""
    batches = ImageBatches(*(part[:count] for part in load("test")), 250, normalisation)
    return lambda model: {"accuracy": 100 * accuracy(model, batches)}

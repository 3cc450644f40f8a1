"""Public data sets read from their own binary formats into tensors, and batches of them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def data_root() -> Path:
    """The folder of the data: the variable MFAC_DATA, or `mfac/data` in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("MFAC_DATA", cache / "mfac" / "data"))


def find(*parts: str) -> Path:
    """A file under the data folder; FileNotFoundError says what belongs there."""
    path = data_root().joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; put the public files under {data_root()}, or set MFAC_DATA")
    return path


def load_cifar10(split: str) -> tuple[Tensor, Tensor]:
    """(images uint8 [n, 3, 32, 32], labels int64 [n]) of "train" (50,000) or "test" (10,000), binary version."""
    names = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}[split]
    records = [np.fromfile(find("cifar-10-batches-bin", name), np.uint8).reshape(-1, 3073) for name in names]
    records = torch.from_numpy(np.concatenate(records))
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()


@dataclass(frozen=True)
class Normalisation:
    """(pixel / 255 − mean) / deviation, channel by channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 images as normalised float32, channels last, which convolutions on CPUs are fastest with."""
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.deviation))
        return ((images.float() / 255 - mean) / deviation).contiguous(memory_format=torch.channels_last)


HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # what the M-FAC authors' ResNet20 was trained with
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Each image shifted by up to `padding` pixels, black beyond its border, and flipped with probability ½."""
    n, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    down, right = torch.randint(0, 2 * padding + 1, (2, n), generator=generator)
    columns = torch.arange(width).repeat(n, 1)
    flipped = torch.rand(n, generator=generator) < 0.5
    columns[flipped] = columns[flipped].flip(1)
    rows = (down[:, None] + torch.arange(height))[:, None, :, None]
    columns = (right[:, None] + columns)[:, None, None, :]
    return padded[torch.arange(n)[:, None, None, None], torch.arange(channels)[None, :, None, None], rows, columns]


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

"""MNIST's idx files and CIFAR's binary records as tensors; normalisation and augmentation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.datasets.folder import find

PIXELS = 3 * 32 * 32
CIFAR10_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
IDX_SPLITS = {"train": "train", "test": "t10k"}


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes, in the shape that its header says."""
    data = np.fromfile(path, np.uint8)
    if len(data) < 4 or data[:3].tolist() != [0, 0, 8]:
        raise ValueError(f"{path} is not an idx file of bytes; it must begin with 0, 0, 8 (is it still compressed?)")
    header = 4 + 4 * int(data[3])
    shape = tuple(data[4:header].view(">u4").astype(np.int64).tolist()) if len(data) >= header else ()
    if len(data) - header != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} is damaged: its header says {list(shape)}, and {len(data) - header} bytes follow")
    return torch.from_numpy(data[header:].reshape(shape))


def load_mnist(split: str, name: str = "mnist") -> tuple[Tensor, Tensor]:
    """(images [n, 1, 28, 28], labels [n]) of "train" or "test"; `name`: "mnist" or "fashion-mnist"."""
    prefix = IDX_SPLITS[_check_split(split)]
    images = read_idx(find(name, name, f"{prefix}-images-idx3-ubyte"))
    labels = read_idx(find(name, name, f"{prefix}-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"{name}: images {list(images.shape)} and labels {list(labels.shape)} do not belong together")
    return images[:, None], labels.long()


def load_cifar10(split: str) -> tuple[Tensor, Tensor]:
    """(images [n, 3, 32, 32], labels [n]) of "train" or "test", from the binary version."""
    paths = [find("cifar10", "cifar-10-batches-bin", name) for name in CIFAR10_FILES[_check_split(split)]]
    records = torch.cat([_read_records(path) for path in paths])
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()


@dataclass(frozen=True)
class Normalisation:
    """(pixel / 255 − mean) / deviation, channel by channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Float32, channels last: the fastest layout for convolutions on CPUs."""
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.deviation))
        return ((images.float() / 255 - mean) / deviation).contiguous(memory_format=torch.channels_last)


HALVES = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # of the M-FAC authors' ResNet20
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def crop_and_flip(images: Tensor, generator: torch.Generator | None = None, padding: int = 4) -> Tensor:
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


def _read_records(path: Path) -> Tensor:
    data, size = np.fromfile(path, np.uint8), 1 + PIXELS
    if len(data) == 0 or len(data) % size:
        raise ValueError(f"{path} is damaged: {len(data)} bytes are no whole number of records of {size}")
    return torch.from_numpy(data.reshape(-1, size))


def _check_split(split: str) -> str:
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", not {split!r}')
    return split

"""Images in folders, one folder per class (ImageNet as it is unpacked), decoded by worker processes.

FOLDER/train/n01440764/n01440764_10026.JPEG
FOLDER/val/n01440764/ILSVRC2012_val_00000293.JPEG
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from experiments.datasets.images import IMAGENET

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
CROP_SHARE = 0.875  # of the shorter side, for testing: 224 of 256 pixels
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of the random crop, in area and in width over height


class ImageFolder(Dataset):
    """Decoded images (uint8 [3, size, size], class), classes in the order of their names.

    With `augment` a random part, flipped with probability ½; otherwise the centre. Image `i` of pass `epoch` is drawn
    by (seed, epoch, i), whichever process decodes it.
    """

    def __init__(self, folder: Path, size: int = 224, *, augment: bool = False, seed: int = 0):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; it must have a sub-folder for each class, with its images")
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in ENDINGS
        ]
        if not self.files:
            raise ValueError(f"{folder} has {len(self.classes)} sub-folders and no image in them ({sorted(ENDINGS)})")
        self.size, self.augment, self.seed, self.epoch = size, augment, seed, 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, number = self.files[index]
        with Image.open(path) as file:
            image: Any = file.convert("RGB")
        if self.augment:
            image = random_crop(image, self.size, np.random.default_rng((self.seed, self.epoch, index)))
        else:
            image = centre_crop(image, self.size)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), number


def centre_crop(image: Any, size: int) -> Any:
    """The centre, after the shorter side is resized to `size`/0.875 pixels."""
    width, height = image.size
    scale = size / CROP_SHARE / min(width, height)
    image = image.resize((max(size, round(width * scale)), max(size, round(height * scale))))
    left, top = (image.size[0] - size) // 2, (image.size[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def random_crop(image: Any, size: int, draw: np.random.Generator) -> Any:
    """A part of 8 to 100 % of the area, of a form between 3:4 and 4:3, resized; flipped with probability ½."""
    width, height = image.size
    box = (0, 0, width, height)
    for _ in range(10):
        area = width * height * draw.uniform(*SCALES)
        ratio = math.exp(draw.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draw.integers(width - w + 1)), int(draw.integers(height - h + 1))
            box = (left, top, left + w, top + h)
            break
    image = image.resize((size, size), box=box)
    return image.transpose(0) if draw.random() < 0.5 else image  # 0: left to right


class FolderBatches:
    """Batches (normalised images, classes) of a folder: shuffled and augmented by a seed, or all in order."""

    def __init__(self, folder: Path, batch_size: int, *, size: int = 224, seed: int | None = None, workers: int = 2):
        shuffle = seed is not None
        self.images = ImageFolder(folder, size, augment=shuffle, seed=seed or 0)
        self.generator = torch.Generator().manual_seed(seed) if seed is not None else None
        self.loader: DataLoader = DataLoader(self.images, batch_size, shuffle=shuffle, generator=self.generator,
                                             drop_last=shuffle, num_workers=workers)  # fmt: skip

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # The number of the pass, drawn from the generator, so that it resumes with it.
        if self.generator is not None:
            self.images.epoch = int(torch.randint(2**31, (), generator=self.generator))
        for images, classes in self.loader:
            yield IMAGENET(images), classes

"""Images in folders, one folder a class (ImageNet as it is unpacked), decoded by worker processes.

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

from experiments.datasets.images import IMAGENET, Normalisation

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
CROP_SHARE = 0.875  # of the shorter side, for testing: 224 of 256 pixels
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of the random crop, in area and in width over height


def require_pillow() -> Any:
    """Pillow's Image module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("folders of images are decoded by Pillow: pip install pillow") from None
    return Image


def list_images(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """([(file, class)], names of the classes): sub-folders in the order of their names.

    Raises:
        ValueError: there is no folder, no class in it, or no image.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; it must have a sub-folder for each class, with its images")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in ENDINGS
    ]
    if not found:
        raise ValueError(
            f"{folder} has {len(classes)} sub-folders and no image in them; it must have one for each class, "
            f"with files that end in {', '.join(sorted(ENDINGS))}"
        )
    return found, classes


class ImageFolder(Dataset):
    """Decoded images (uint8 [3, size, size], class), cropped at random and flipped, or from the middle.

    Args:
        folder: with a sub-folder for each class.
        size: of the square that is cut out.
        augment: a random part of the image, flipped with probability ½; else the middle of it.
        seed: of the augmentation; image `i` of pass `e` is drawn by (seed, e, i), whichever process decodes it.
    """

    def __init__(self, folder: Path, size: int = 224, *, augment: bool = False, seed: int = 0):
        require_pillow()
        self.files, self.classes = list_images(folder)
        self.size, self.augment, self.seed, self.epoch = size, augment, seed, 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, number = self.files[index]
        with require_pillow().open(path) as file:
            image = file.convert("RGB")
        if self.augment:
            image = random_crop(image, self.size, np.random.default_rng((self.seed, self.epoch, index)))
        else:
            image = centre_crop(image, self.size)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), number


def centre_crop(image: Any, size: int) -> Any:
    """The middle of the image, whose shorter side is first made `size`/0.875 pixels long."""
    width, height = image.size
    scale = size / CROP_SHARE / min(width, height)
    image = image.resize((max(size, round(width * scale)), max(size, round(height * scale))))
    left, top = (image.size[0] - size) // 2, (image.size[1] - size) // 2
    return image.crop((left, top, left + size, top + size))


def random_crop(image: Any, size: int, draw: np.random.Generator) -> Any:
    """A part of 8 to 100 % of the area, of a form between 3:4 and 4:3, resized; mirrored in half of the cases."""
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
    return image.transpose(require_pillow().Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else image


class FolderBatches:
    """Batches (normalised images, classes) of a folder, anew in each pass; decoding goes on while a model computes.

    Args:
        folder: with a sub-folder for each class.
        batch_size: of every batch; a smaller last one is left out where batches are shuffled.
        size: of the images.
        seed: of the order and of the augmentation; None: in order, the middle of each image.
        workers: processes that decode; 0: this one.
        normalisation: of the pixels.
    """

    def __init__(self, folder: Path, batch_size: int, *, size: int = 224, seed: int | None = None, workers: int = 2,
                 normalisation: Normalisation = IMAGENET):  # fmt: skip
        self.images = ImageFolder(folder, size, augment=seed is not None, seed=seed or 0)
        self.normalisation = normalisation
        # Its state is what a run that is resumed needs.
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.loader: DataLoader = DataLoader(
            self.images,
            batch_size,
            shuffle=seed is not None,
            generator=self.generator,
            drop_last=seed is not None,
            num_workers=workers,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # The pass's number for the augmentation, drawn from the generator, so that it is as resumable as the order.
        if self.generator is not None:
            self.images.epoch = int(torch.randint(2**31, (), generator=self.generator))
        for images, classes in self.loader:
            yield self.normalisation(images), classes

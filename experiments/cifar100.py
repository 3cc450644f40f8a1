"""CIFAR-100 from its binary version: a coarse label, a fine label and 3 x 32 x 32 pixels a record."""

import numpy as np
import torch
from torch import Tensor

from experiments.data import find

RECORD = 2 + 3 * 32 * 32


def load_cifar100(split: str) -> tuple[Tensor, Tensor]:
    """(images uint8 [n, 3, 32, 32], fine labels [n]) of "train" (50,000) or "test" (10,000).

    Raises:
        FileNotFoundError: `cifar-100-binary` is not in the data folder.
        ValueError: a damaged file.
    """
    path = find("cifar-100-binary", f"{split}.bin")
    bytes_read = np.fromfile(path, np.uint8)
    if len(bytes_read) == 0 or len(bytes_read) % RECORD:
        raise ValueError(f"{path} is damaged: {len(bytes_read)} bytes are no whole number of records of {RECORD}")
    records = torch.from_numpy(bytes_read.reshape(-1, RECORD))
    return records[:, 2:].reshape(-1, 3, 32, 32).contiguous(), records[:, 1].long()

"""The entries of largest size in each block of a vector: how many there are, and which.

Entries are numbered block by block; an index is counted from the start of its block, so that 16 bits hold it.
"""

from collections.abc import Iterator
from math import ceil

import torch
from jaxtyping import Float, Int
from torch import Tensor

LONGEST_BLOCK = 1 << 15  # of which int16 can tell every column


def num_kept(length: int, density: float) -> int:
    """How many entries a block of so many columns keeps."""
    return min(length, ceil(density * length))


def num_entries(dim: int, density: float, block: int) -> int:
    """How many entries a vector of so many columns keeps."""
    return dim // block * num_kept(block, density) + num_kept(dim % block, density)


def entry_blocks(
    dim: int, density: float, block: int, first: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, slice]]:
    """(start, stop, entries) of the blocks that have columns from `first` to `end`, the last one where it is None."""
    kept = num_kept(block, density)
    for index in range(first // block, -(-(dim if end is None else end) // block)):
        start, stop = index * block, min((index + 1) * block, dim)
        yield start, stop, slice(index * kept, index * kept + num_kept(stop - start, density))


def largest(a: Float[Tensor, " d"], density: float, block: int) -> Int[Tensor, " entries"]:
    """Indices of the largest entries, within each block in no order."""
    sizes, whole = a.abs(), len(a) - len(a) % block
    parts = (sizes[:whole].view(-1, block), sizes[whole:].view(1, -1))
    chosen = [part.topk(num_kept(part.shape[1], density), sorted=False).indices for part in parts if part.numel()]
    return torch.cat([indices.flatten() for indices in chosen])

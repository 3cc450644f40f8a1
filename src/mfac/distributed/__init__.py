"""Which columns of a window a process holds: all of them, a chunk of every parameter, or those of its shards.

A row has the gradient of every parameter side by side. Over R ranks each of them holds some columns, so that a product
with the window is a sum over ranks, and whatever is m x m is the same on all of them.
"""

from mfac.distributed.choice import agree_on, columns_of, ranks_of
from mfac.distributed.columns import Columns
from mfac.distributed.placements import is_placed, like, local, local_gradients, local_pieces

__all__ = [
    "Columns",
    "agree_on",
    "columns_of",
    "is_placed",
    "like",
    "local",
    "local_gradients",
    "local_pieces",
    "ranks_of",
]

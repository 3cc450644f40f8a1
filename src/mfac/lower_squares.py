"""Column sums of (L X)² for a lower triangular L by compiled code: torch would write L X, and read it again.

Those of X² come along. `lower_squares.c` is compiled as `native` does it, and where it does; where not, `products` does
it with torch.
"""

import ctypes
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mfac import native
from mfac.native import longs, pointers

SOURCE = Path(__file__).with_suffix(".c")
ROWS, STRIP = 6, 64  # as in lower_squares.c
LEAST_ROWS = 32  # below it the time goes into reading X, not into products


class LowerSquares:
    """The sums for blocks of L and X, in float32."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def __call__(
        self,
        L: Float[Tensor, "blocks m m"],
        X: Float[Tensor, "blocks m length"],
        weights: Float[Tensor, " m"] | None = None,
    ) -> tuple[Float[Tensor, "blocks length"], Float[Tensor, "blocks length"]]:
        """Column sums of (L X)², and of X² with a weight for each row; summed in float32, returned in float64."""
        X = X if X.stride(2) == 1 else X.contiguous()
        weights = torch.ones(X.shape[1]) if weights is None else weights.float()
        of_product, plain = torch.empty(len(X), X.shape[2]), torch.empty(len(X), X.shape[2])
        for lower, part, *sums in zip(L.contiguous(), X, of_product, plain, strict=True):
            self._squares_of(lower, part, weights, sums)
        return of_product.double(), plain.double()

    def _squares_of(
        self,
        L: Float[Tensor, "m m"],
        X: Float[Tensor, "m length"],
        weights: Float[Tensor, " m"],
        out: list[Float[Tensor, " length"]],
    ) -> None:
        m, length = X.shape
        packed = torch.empty(sum(ROWS * min(m, top + ROWS) for top in range(0, m, ROWS)))
        self._library.pack(*pointers(L), *longs(m), *pointers(packed))

        def columns(first: int, last: int) -> None:
            strip = torch.empty(m * STRIP)
            shape = longs(m, X.stride(0), first, last)
            self._library.squares(*pointers(packed, X, weights), *shape, *pointers(strip, *out))

        native.in_threads(columns, length, STRIP)


def find(count: int, m: int, dtype: torch.dtype, device: torch.device) -> LowerSquares | None:
    """Compiled code for m rows with `count` numbers in all; None where torch is to be used."""
    if not (dtype == torch.float32 and m >= LEAST_ROWS and native.worthwhile(device, count)):
        return None
    library = native.compiled(SOURCE)
    return None if library is None else LowerSquares(library)

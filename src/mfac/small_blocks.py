"""Set-up and diagonal of many small blocks by compiled code: torch's calls for batches cost more than their arithmetic.

`small_blocks.c` is compiled as `native` does it, and where it does; where not, torch is used.
"""

import ctypes
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mfac import native
from mfac.native import longs, pointers

SOURCE = Path(__file__).with_suffix(".c")
MOST_ROWS = 96  # LAPACK is as fast from there on
MOST_NUMBERS = 1 << 16  # of a block: all of it stays in the second cache
STRIP, COLUMNS, CHUNK = 64, 16, 128  # as in small_blocks.c


class _Blocks(ctypes.Structure):
    """The struct of the same name in small_blocks.c."""

    _fields_ = [("numbers", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("between_blocks", "between_rows", "m", "length")
    ]


class SmallBlocks:
    """L and the sums of squares of blocks G [blocks, m, length] in float32."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._library.factor.restype = ctypes.c_int64

    def factor(
        self, G: Float[Tensor, "blocks m length"], shift: float, limit: float, out: Float[Tensor, "blocks m m"]
    ) -> bool:
        """Writes L with L Lᵀ = shift · I + G Gᵀ, column behind column, in float64.

        False, and `out` is not to be used, where a sum of sizes in a row of G Gᵀ is beyond the limit or not finite, or
        the matrix is not positive definite.
        """
        G, (count, m, _) = _in_rows(G), G.shape
        U, done = out.transpose(1, 2), []
        assert U.is_contiguous()
        numbers = m + CHUNK * COLUMNS * -(-m // COLUMNS) // 2

        def blocks(first: int, last: int) -> None:
            room = torch.empty(numbers, dtype=torch.float64)
            done.append(
                self._library.factor(
                    ctypes.byref(_described(G)), ctypes.c_double(shift), ctypes.c_double(limit), *longs(first, last),
                    *pointers(room, U),
                )
            )  # fmt: skip

        native.in_threads(blocks, count, 1)
        return all(done)

    def squares(
        self, L: Float[Tensor, "blocks m m"], G: Float[Tensor, "blocks m length"]
    ) -> tuple[Float[Tensor, "blocks length"], Float[Tensor, "blocks length"]]:
        """Column sums of (L⁻¹G)² and of G²."""
        G, (count, m, length) = _in_rows(G), G.shape
        U = L.transpose(1, 2).contiguous()
        whitened, plain = torch.empty(count, length), torch.empty(count, length)

        def blocks(first: int, last: int) -> None:
            room = torch.empty(m * (m + STRIP))
            self._library.squares(
                ctypes.byref(_described(G)), *pointers(U), *longs(first, last), *pointers(room, whitened, plain)
            )

        native.in_threads(blocks, count, 1)
        return whitened.double(), plain.double()


def find(count: int, m: int, length: int, dtype: torch.dtype, device: torch.device) -> SmallBlocks | None:
    """Compiled code for so many blocks of that kind; None where torch is to be used."""
    small = count > 1 and m <= MOST_ROWS and m * length <= MOST_NUMBERS
    if not (small and dtype == torch.float32 and native.worthwhile(device, count * m * length)):
        return None
    library = native.compiled(SOURCE)
    return None if library is None else SmallBlocks(library)


def _in_rows(G: Float[Tensor, "blocks m length"]) -> Float[Tensor, "blocks m length"]:
    return G if G.stride(2) == 1 else G.contiguous()


def _described(G: Float[Tensor, "blocks m length"]) -> _Blocks:
    return _Blocks(G.data_ptr(), G.stride(0), G.stride(1), G.shape[1], G.shape[2])

"""Rows of floating-point numbers: a plain matrix."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mfac import native, products
from mfac.pages import Pages
from mfac.windows.rows import Pieces, Rows, SavedRows, StoredRow, check_fits

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Plain:
    """Rows in one floating-point dtype."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The dtype's."""
        return str(self.dtype)

    def bytes(self, num_grads: int, dim: int) -> int:
        """The matrix."""
        return num_grads * dim * self.dtype.itemsize

    def build(self, num_grads: int, dim: int, device: torch.device) -> Rows:
        """Rows of zeros."""
        return PlainRows(self, torch.zeros(num_grads, dim, dtype=self.dtype, device=device))


class PlainRows:
    """A matrix [m, d]; where the arithmetic is in another dtype, `native` or `products` convert it as they read it."""

    def __init__(self, kind: Plain, G: Float[Tensor, "m d"]):
        self.kind = kind
        self.dtype = G.dtype
        self._G = G

    @property
    def shape(self) -> tuple[int, int]:
        """(m, d)."""
        return self._G.shape[0], self._G.shape[1]

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """g in the dtype of the rows."""
        return StoredRow(g if g.dtype == self.dtype else g.to(self.dtype))

    def write(self, k: int, stored: StoredRow) -> None:
        """Row k becomes these numbers."""
        self._G[k] = stored.dense

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        """G x."""
        compiled = self._compiled(dtype) if x.ndim == 1 else None
        return products.project(self._first(n), x, dtype) if compiled is None else compiled.project(n, x)

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        """Gᵀ a."""
        compiled = self._compiled(dtype) if a.ndim == 1 else None
        return products.combine(self._first(a.shape[0]), a, dtype) if compiled is None else compiled.combine(a)

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        """G Gᵀ."""
        return products.gram(self._G[:n], dtype)

    def row(self, k: int) -> Float[Tensor, " d"]:
        """A view."""
        return self._G[k]

    def dense(self) -> Float[Tensor, "m d"]:
        """The matrix itself."""
        return self._G

    def pages(self, n: int) -> Pages:
        """Views."""
        return Pages(self._G[:n], self._G.device)

    def widen(self, extra: int) -> None:
        """A wider matrix, made beside the present one."""
        m, d = self.shape
        G = torch.zeros(m, d + extra, dtype=self.dtype, device=self._G.device)
        G[:, :d] = self._G
        self._G = G

    def state(self) -> Float[Tensor, "m d"]:
        """The matrix itself."""
        return self._G

    def load(self, saved: SavedRows, n: int) -> bool:
        """Copies pieces of the columns; rows stored otherwise one by one."""
        converted = saved.kind != self.kind
        if converted:
            check_fits(self, saved, n)
        if isinstance(saved, Pieces):
            widths = [piece.shape[1] for piece in saved.pieces]
            for columns, piece in zip(self._G.split(widths, dim=1), saved.pieces, strict=True):
                columns.copy_(piece)
            return converted
        self._G[n:] = 0
        for k in range(n):
            self._G[k] = saved.row(k)
        return converted

    def _first(self, n: int) -> Float[Tensor, "n d"]:
        return self._G if n == self._G.shape[0] else self._G[:n]  # making a view takes time too

    def _compiled(self, dtype: torch.dtype) -> native.NativeProducts | None:
        return None if dtype == self.dtype else native.find(dtype, self._G, self.shape)

"""Rows of floating-point numbers: a plain matrix."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac import products
from mfac.pages import Pages
from mfac.windows import native
from mfac.windows.rows import Rows, SavedRows, StoredRow

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Plain:
    """Rows in one floating-point dtype."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype)

    def bytes(self, num_grads: int, dim: int) -> int:
        return num_grads * dim * self.dtype.itemsize

    def build(self, num_grads: int, dim: int, device: torch.device) -> Rows:
        rows = PlainRows(torch.zeros(num_grads, dim, dtype=self.dtype, device=device))
        if num_grads * dim >= native.LEAST_NUMBERS:
            rows.compiled(torch.float64)  # compiles now, not in the first step
        return rows


class PlainRows(Rows):
    """A matrix [m, d]; `native` or `products` convert it as they read it where the arithmetic is in another dtype."""

    def __init__(self, G: Float[Tensor, "m d"]):
        self.kind = Plain(G.dtype)
        self.shape = G.shape[0], G.shape[1]
        self.dtype = G.dtype
        self.device = G.device
        self._G = G
        self._stored: native.Stored = native.Stored(G)

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        return StoredRow(g if g.dtype == self.dtype else g.to(self.dtype))

    def write(self, k: int, stored: StoredRow) -> None:
        self._G[k] = stored.dense

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        compiled = self._stored.project(n, x, dtype) if dtype != self.dtype and x.ndim == 1 else None
        return products.project(self._G[:n], x, dtype) if compiled is None else compiled

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        compiled = self._stored.combine(a, dtype) if dtype != self.dtype and a.ndim == 1 else None
        return products.combine(self._G[: len(a)], a, dtype) if compiled is None else compiled

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        return products.gram(self._G[:n], dtype)

    def row(self, k: int) -> Float[Tensor, " d"]:
        return self._G[k]

    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        return self._G[:n, start:stop]

    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        return self._G[:n, indices]

    def pages(self, n: int) -> Pages:
        return Pages(self._G[:n], self.device, window=self)

    def widened(self, extra: int) -> Rows:
        return PlainRows(F.pad(self._G, (0, extra)))

    def state(self) -> Float[Tensor, "m d"]:
        return self._G

    def load(self, saved: SavedRows, n: int) -> bool:
        self._store(saved, n, self.encode)
        self._G[n:] = 0
        return saved.kind != self.kind

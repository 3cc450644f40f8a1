"""Rows of which only the largest entries are kept; the rest is added to the next row (error feedback).

The method is EFCP (Modoranu, Kalinov, Kurtic, Frantar, Alistarh: Error Feedback Can Accurately Compress
Preconditioners, ICML 2024): a ← ξ + g;  c ← T_k(a) enters the window;  ξ ← a − c.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac import products
from mfac.memory import is_count
from mfac.saved import tensor_of
from mfac.windows.rows import Rows, SavedRows, StoredRow

LONGEST_BLOCK = 1 << 15  # int16 can index all of its columns
TILE = 1 << 19  # entries gathered at a time


@dataclass(frozen=True)
class TopK:
    """Rows that keep the largest entries of each block of columns, with error feedback for the others.

    Args:
        density: the part of each block that is kept, rounded up.
        block: columns among which the largest are chosen; at most 32768.
        dtype: of the kept numbers; their rounding errors are fed back too.

    Raises:
        ValueError: an argument out of its range.
    """

    density: float = 0.01
    block: int = LONGEST_BLOCK
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"the density of TopK must be above 0 and at most 1, not {self.density!r}; 0.01 keeps 1 %")
        if not is_count(self.block) or self.block > LONGEST_BLOCK:
            raise ValueError(
                f"the block of TopK must be an int from 1 to {LONGEST_BLOCK} (indices are int16), not {self.block!r}"
            )
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"TopK keeps its numbers in torch.bfloat16 or torch.float32, not {self.dtype!r}")

    @property
    def name(self) -> str:
        return f"mfac.TopK({self.density:g})" if self == TopK(self.density) else f"mfac.{self!r}"

    def kept(self, length: int) -> int:
        """How many entries a block of so many columns keeps."""
        return min(length, math.ceil(self.density * length))

    def entries(self, dim: int) -> int:
        """How many entries a row of so many columns keeps."""
        return dim // self.block * self.kept(self.block) + self.kept(dim % self.block)

    def bytes(self, num_grads: int, dim: int) -> int:
        return num_grads * self.entries(dim) * (2 + self.dtype.itemsize) + 4 * dim

    def build(self, num_grads: int, dim: int, device: torch.device) -> Rows:
        entries = self.entries(dim)
        indices = torch.zeros(num_grads, entries, dtype=torch.int16, device=device)
        values = torch.zeros(num_grads, entries, dtype=self.dtype, device=device)
        return TopKRows(self, indices, values, torch.zeros(dim, dtype=torch.float32, device=device))


class TopKRows(Rows):
    """Indices within their block and values, [m, entries], entries by block; products gather and scatter.

    An unused entry (of a row of zeros) has the index 0 and the value 0, and changes no sum.
    """

    kind: TopK

    def __init__(self, kind: TopK, indices: Tensor, values: Tensor, error: Float[Tensor, " d"]):
        self.kind = kind
        self.shape = len(indices), len(error)
        self.device = error.device
        self._indices = indices
        self._values = values
        self._error = error
        entries = torch.arange(indices.shape[1], device=error.device)
        self._starts = entries // kind.kept(kind.block) * kind.block  # the first column of every entry's block

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """The largest entries of g plus the error; the rest becomes the error when the row is written."""
        return self._encode(self._error + g.float())

    def write(self, k: int, stored: StoredRow) -> None:
        self._indices[k], self._values[k], self._error = stored.parts

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        x = x.to(dtype)
        out = torch.zeros(n, *x.shape[1:], dtype=torch.float64, device=x.device)
        for columns, rows, indices, values in self._tiles(n):
            found = x[columns].index_select(0, indices.flatten()).view(*indices.shape, *x.shape[1:])
            found *= values.to(dtype).view(*values.shape, *[1] * (x.ndim - 1))
            out[rows] += found.sum(1)
        return out

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        a = a.to(dtype)
        out = torch.zeros(self.shape[1], *a.shape[1:], dtype=dtype, device=a.device)
        for columns, rows, indices, values in self._tiles(len(a)):
            terms = values.to(dtype).view(*values.shape, *[1] * (a.ndim - 1)) * a[rows, None]
            out[columns].index_add_(0, indices.flatten(), terms.flatten(0, 1))
        return out

    def row(self, k: int) -> Float[Tensor, " d"]:
        return self._spread(self._indices[k], self._values[k].float())

    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        wanted, where = indices.unique(return_inverse=True)
        out = torch.zeros(n, len(wanted) + 1, dtype=self.dtype, device=self.device)  # the last takes unwanted entries
        for number in (wanted // self.kind.block).unique().tolist():
            columns, entries = self._block(number)
            found = self._indices[:n, entries].long() + columns.start
            places = torch.searchsorted(wanted, found).clamp_max_(len(wanted) - 1)
            places.masked_fill_(wanted[places] != found, len(wanted))
            out.scatter_add_(1, places, self._values[:n, entries].float())
        return out[:, where]

    def widened(self, extra: int) -> Rows:
        """The last block grows and may keep more entries from now on, behind those it has; new blocks follow."""
        dim = self.shape[1] + extra
        more = (0, self.kind.entries(dim) - self._indices.shape[1])
        indices, values = F.pad(self._indices, more), F.pad(self._values, more)
        return TopKRows(self.kind, indices, values, F.pad(self._error, (0, extra)))

    def state(self) -> dict[str, Any]:
        kind = {"density": self.kind.density, "block": self.kind.block}
        return {"kind": "topk", **kind, "indices": self._indices, "values": self._values, "error": self._error}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "TopKRows":
        """Reads a saved state, in its own memory."""
        kind = TopK(float(state["density"]), int(state["block"]), state["values"].dtype)
        error = tensor_of(state, "error", tuple(state["error"].shape))
        values = tensor_of(state, "values", (len(state["values"]), kind.entries(len(error))))
        indices = tensor_of(state, "indices", tuple(values.shape))
        rows = cls(kind, indices, values, error)
        places = indices.long()  # int16 compares wrongly with a block of 32768
        outside = (places < 0) | (places >= kind.block) | (rows._starts + places >= len(error))
        if indices.dtype != torch.int16 or bool(outside.any()):
            raise ValueError(f"saved indices of TopK are outside of {len(error)} columns: the state is damaged")
        return rows

    def load(self, saved: SavedRows, n: int) -> bool:
        """Copies rows of the same kind. Of other rows the largest entries are kept and the rest is dropped: these rows
        have had their step. The error comes from any TopK of the same columns, and is zero otherwise."""
        error = saved._error if isinstance(saved, TopKRows) and saved.shape == self.shape else None
        converted = error is None or saved.kind != self.kind
        if isinstance(saved, TopKRows) and not converted:
            self._indices.copy_(saved._indices)
            self._values.copy_(saved._values)
        else:
            self._store(saved, n, lambda row: self._encode(row.float()))
            self._indices[n:], self._values[n:] = 0, 0
        self._error = torch.zeros_like(self._error) if error is None else error.to(self._error, copy=True)
        return converted

    def _encode(self, a: Float[Tensor, " d"]) -> StoredRow:
        """T_k(a), and a − T_k(a)."""
        whole = len(a) - len(a) % self.kind.block
        parts = [part for part in (a[:whole].view(-1, self.kind.block), a[whole:].view(1, -1)) if part.numel()]
        chosen = [part.abs().topk(self.kind.kept(part.shape[1]), sorted=False).indices for part in parts]
        indices = torch.cat([each.flatten() for each in chosen])
        places = indices + self._starts
        values = a[places].to(self.kind.dtype)
        error = a.index_add(0, places, values.float(), alpha=-1)
        return StoredRow(self._spread(indices, values.float()), (indices.to(torch.int16), values, error))

    def _spread(self, indices: Int[Tensor, " entries"], values: Float[Tensor, " entries"]) -> Float[Tensor, " d"]:
        """The entries of one row in their columns."""
        return torch.zeros_like(self._error).index_add_(0, indices + self._starts, values)

    def _block(self, number: int) -> tuple[slice, slice]:
        """The columns and the entries of a block."""
        start, kept = number * self.kind.block, self.kind.kept(self.kind.block)
        stop = min(start + self.kind.block, self.shape[1])
        return slice(start, stop), slice(number * kept, number * kept + self.kind.kept(stop - start))

    def _tiles(self, n: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Columns and rows of a tile, indices of its entries counted from the first of these columns, and values."""
        for number in range(-(-self.shape[1] // self.kind.block)):
            columns, entries = self._block(number)
            for rows in products.spans(n, max(1, TILE // (entries.stop - entries.start))):
                yield columns, rows, self._indices[rows, entries].to(torch.int32), self._values[rows, entries]

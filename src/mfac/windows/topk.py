"""Rows of which only the largest entries are kept, the rest being given to the next row (error feedback).

The method is EFCP (Modoranu, Kalinov, Kurtic, Frantar, Alistarh: Error Feedback Can Accurately Compress
Preconditioners, ICML 2024): a ← ξ + g;  c ← T_k(a) enters the window;  ξ ← a − c.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.largest_entries import LONGEST_BLOCK, entry_blocks, largest, num_entries
from mfac.windows.pages import CompressedRows
from mfac.windows.rows import Rows, SavedRows, StoredRow, check_fits

TILE = 1 << 19  # entries gathered at a time


@dataclass(frozen=True)
class TopK:
    """Rows that keep the entries of largest size in each block of columns, and error feedback for the others.

    Args:
        density: the part of each block that is kept, rounded up.
        block: columns of which the largest are chosen; at most 32768.
        dtype: of the kept numbers; what rounding takes from them goes into the error too.

    Raises:
        ValueError: an argument out of its range.
    """

    density: float = 0.01
    block: int = LONGEST_BLOCK
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"the density of TopK must be above 0 and at most 1, not {self.density!r}; 0.01 keeps 1 %")
        if not isinstance(self.block, int) or isinstance(self.block, bool) or not 0 < self.block <= LONGEST_BLOCK:
            raise ValueError(
                f"the block of TopK must be an int from 1 to {LONGEST_BLOCK} (indices are int16), not {self.block!r}"
            )
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"TopK keeps its numbers in torch.bfloat16 or torch.float32, not {self.dtype!r}")

    @property
    def name(self) -> str:
        """As it was asked for."""
        return f"mfac.TopK({self.density:g})" if self == TopK(self.density) else f"mfac.{self!r}"

    def entries(self, dim: int) -> int:
        """How many entries a row of so many columns keeps."""
        return num_entries(dim, self.density, self.block)

    def bytes(self, num_grads: int, dim: int) -> int:
        """Indices and numbers, and one error vector in float32."""
        return num_grads * self.entries(dim) * (2 + self.dtype.itemsize) + 4 * dim

    def build(self, num_grads: int, dim: int, device: torch.device) -> Rows:
        """Rows of zeros."""
        entries = self.entries(dim)
        indices = torch.zeros(num_grads, entries, dtype=torch.int16, device=device)
        values = torch.zeros(num_grads, entries, dtype=self.dtype, device=device)
        return TopKRows(self, indices, values, torch.zeros(dim, device=device))


class TopKRows(CompressedRows):
    """Indices within their block and values, [m, entries], entries by block; products gather and scatter.

    An entry that is not used (in a row of zeros) has the index 0 and the value 0, and changes no sum.
    """

    dtype = torch.float32

    def __init__(self, kind: TopK, indices: Tensor, values: Tensor, error: Float[Tensor, " d"]):
        self.kind = kind
        self.shape = len(indices), len(error)
        self._indices = indices
        self._values = values
        self._error = error
        self._layout = list(entry_blocks(len(error), kind.density, kind.block))
        lengths = ((start, entries.stop - entries.start) for start, _, entries in self._layout)
        starts = [torch.full((kept,), start, device=error.device) for start, kept in lengths]
        self._starts = torch.cat(starts)  # the first column of every entry's block

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """The largest entries of g and the error so far; what is left becomes the error when the row is written."""
        return self._encode(self._error + g.float())

    def write(self, k: int, stored: StoredRow) -> None:
        """Row k, and the error."""
        self._indices[k], self._values[k], self._error = stored.parts

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        """G x: gathers."""
        x = x.to(dtype)
        out = torch.zeros(n, *x.shape[1:], dtype=torch.float64, device=x.device)
        for columns, rows, indices, values in self._tiles(n):
            found = x[columns].index_select(0, indices.flatten()).view(*indices.shape, *x.shape[1:])
            found *= values.to(dtype).view(*values.shape, *[1] * (x.ndim - 1))
            out[rows] += found.sum(1)
        return out

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        """Gᵀ a: scatters."""
        a = a.to(dtype)
        out = torch.zeros(self.shape[1], *a.shape[1:], dtype=dtype, device=a.device)
        for columns, rows, indices, values in self._tiles(len(a)):
            terms = values.to(dtype).view(*values.shape, *[1] * (a.ndim - 1)) * a[rows, None]
            out[columns].index_add_(0, indices.flatten(), terms.flatten(0, 1))
        return out

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k, with its zeros."""
        return self._spread(self._indices[k], self._values[k].float())

    def widen(self, extra: int) -> None:
        """The last block grows, and may keep more entries from now on; others follow it."""
        m, d = self.shape
        wider = self.kind.build(m, d + extra, self._error.device)
        assert isinstance(wider, TopKRows)
        entries = self._indices.shape[1]  # they stay where they are: only the last block gets room, behind them
        wider._indices[:, :entries] = self._indices
        wider._values[:, :entries] = self._values
        wider._error[:d] = self._error
        self._indices, self._values, self._error = wider._indices, wider._values, wider._error
        self.shape, self._layout, self._starts = wider.shape, wider._layout, wider._starts

    def state(self) -> dict[str, Any]:
        """Indices, values and the error, and how to read them."""
        kind = {"density": self.kind.density, "block": self.kind.block}
        return {"kind": "topk", **kind, "indices": self._indices, "values": self._values, "error": self._error}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "TopKRows":
        """Reads a saved state, in its own memory."""
        kind = TopK(float(state["density"]), int(state["block"]), state["values"].dtype)
        return cls(kind, state["indices"], state["values"], state["error"])

    def load(self, saved: SavedRows, n: int) -> bool:
        """Copies what was made alike. Of other rows it keeps the largest entries, and the rest is lost: these rows have
        had their step. An error is taken over from any TopK of the same columns, and is zero otherwise."""
        error = saved._error if isinstance(saved, TopKRows) and saved.shape == self.shape else None
        converted = error is None or saved.kind != self.kind
        if isinstance(saved, TopKRows) and not converted:
            self._indices.copy_(saved._indices)
            self._values.copy_(saved._values)
        else:
            check_fits(self, saved, n, lambda row: self._encode(row.to(self._error)))
            self._indices.zero_()
            self._values.zero_()
            for k in range(n):
                self._indices[k], self._values[k], _ = self._encode(saved.row(k).to(self._error)).parts
        self._error = torch.zeros_like(self._error) if error is None else error.to(self._error, copy=True)
        return converted

    def _encode(self, a: Float[Tensor, " d"]) -> StoredRow:
        """T_k(a), and a − T_k(a)."""
        indices = largest(a, self.kind.density, self.kind.block)
        places = indices + self._starts
        values = a[places].to(self.kind.dtype)
        dense = self._spread(indices, values.float())
        error = a.index_add(0, places, values.float(), alpha=-1)
        return StoredRow(dense, (indices.to(torch.int16), values, error))

    def _spread(self, indices: Int[Tensor, " entries"], values: Float[Tensor, " entries"]) -> Float[Tensor, " d"]:
        """Entries of one row, in their columns."""
        return torch.zeros_like(self._error).index_add_(0, indices + self._starts, values)

    def _tiles(self, n: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Columns and rows of a tile, indices of its entries counted from the first of these columns, and values."""
        for start, stop, entries in self._layout:
            height = max(1, TILE // (entries.stop - entries.start))
            for top in range(0, n, height):
                rows = slice(top, min(top + height, n))
                indices = self._indices[rows, entries].to(torch.int32)
                yield slice(start, stop), rows, indices, self._values[rows, entries]

    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Columns of the first n rows, with their zeros."""
        out = torch.zeros(n, stop - start + 1, device=self._error.device)  # the last column takes what is outside
        for left, indices, values in self._touched(n, start, stop):
            places = indices + (left - start)
            outside = (places < 0) | (places >= stop - start)
            out.scatter_add_(1, places.masked_fill_(outside, stop - start), values)
        return out[:, :-1]

    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Single columns of the first n rows, with their zeros."""
        wanted, where = indices.unique(return_inverse=True)
        out = torch.zeros(n, len(wanted) + 1, device=self._error.device)  # the last column takes what nobody wants
        for left, found, values in self._touched(n, 0, self.shape[1], wanted):
            places = torch.searchsorted(wanted, found + left)
            missed = wanted[places.clamp_max(len(wanted) - 1)] != found + left
            out.scatter_add_(1, places.masked_fill_(missed, len(wanted)), values)
        return out[:, where]

    def _touched(
        self, n: int, start: int, stop: int, wanted: Int[Tensor, " c"] | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First column, indices and values of the blocks between two columns, of those with wanted columns only."""
        blocks = None if wanted is None else set((wanted // self.kind.block).tolist())
        for number, (left, right, entries) in enumerate(self._layout):
            if left < stop and right > start and (blocks is None or number in blocks):
                yield left, self._indices[:n, entries].long(), self._values[:n, entries].float()

"""Rows in eight bits a number, with one scale a block of columns: a quarter of the memory of float32."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import native, quantization
from mfac.windows.pages import CompressedRows
from mfac.windows.rows import Rows, SavedRows, StoredRow, check_fits

TILE = 1 << 20  # numbers converted at a time: few calls, and still in cache


@dataclass(frozen=True)
class Int8:
    """Rows in int8: symmetric, one float32 scale a block of columns of a row.

    Args:
        block: columns that share a scale. Shorter ones follow the gradient closer, longer ones are faster.
        stochastic: round up or down with the probabilities that make it right on average, instead of to the nearest.
        seed: of these draws, which are the window's own: no random state of torch is used.

    Raises:
        ValueError: the block is not a positive int.
    """

    block: int = 4096
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(f"the block of Int8 must be a positive int, not {self.block!r}; 4096 is the default")

    @property
    def name(self) -> str:
        """As it was asked for."""
        return "torch.int8" if self == Int8() else f"mfac.{self!r}"

    def bytes(self, num_grads: int, dim: int) -> int:
        """A byte a number, and the scales."""
        return num_grads * (dim + 4 * quantization.num_blocks(dim, self.block))

    def build(self, num_grads: int, dim: int, device: torch.device) -> Rows:
        """Rows of zeros."""
        codes = torch.zeros(num_grads * dim, dtype=torch.int8, device=device)
        scales = torch.zeros(quantization.num_blocks(dim, self.block), num_grads, device=device)
        return Int8Rows(self, codes, scales, dim)


class Int8Rows(CompressedRows):
    """Codes [m, block] of one block of columns after the other, and scales [blocks, m].

    A pass converts a tile of rows of one block at a time. Its scales never touch the tile: they are one number a row
    there, and multiply what goes in (Gᵀa) or comes out (Gx).
    """

    dtype = torch.float32

    def __init__(self, kind: Int8, codes: Tensor, scales: Float[Tensor, "blocks m"], dim: int, written: int = 0):
        self.kind = kind
        self.shape = scales.shape[1], dim
        self._codes = codes
        self._scales = scales
        self._written = written  # numbers the draws of stochastic rounding

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """Codes and scales of g."""
        codes, scales = quantization.quantize(g, self.kind.block, self._noise())
        return StoredRow(quantization.dequantize(codes, scales, self.kind.block), (codes, scales))

    def write(self, k: int, stored: StoredRow) -> None:
        """Row k, over all blocks."""
        codes, scales = stored.parts
        for start, blocks in self._runs():
            stop = start + len(blocks) * blocks.shape[2]
            blocks[:, k] = codes[start:stop].view(len(blocks), -1)
        self._scales[:, k] = scales
        self._written += 1

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        """G x."""
        compiled = self._compiled(dtype) if x.ndim == 1 else None
        if compiled is not None:
            return compiled.project(n, x)
        x = x.to(dtype)
        parts = torch.empty(len(self._scales), n, *x.shape[1:], dtype=dtype, device=x.device)
        for index, columns, rows, tile in self._tiles(n, dtype):
            torch.matmul(tile, x[columns], out=parts[index, rows])
        scales = self._scales[:, :n].double()
        return torch.einsum("bn...,bn->n...", parts.double(), scales)

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        """Gᵀ a."""
        compiled = self._compiled(dtype) if a.ndim == 1 else None
        if compiled is not None:
            return compiled.combine(a)
        out = torch.zeros(self.shape[1], *a.shape[1:], dtype=dtype, device=a.device)
        scaled, last = a, -1
        for index, columns, rows, tile in self._tiles(len(a), dtype):
            if index != last:
                scales = self._scales[index, : len(a)].double().view(-1, *[1] * (a.ndim - 1))
                scaled, last = (a * scales).to(dtype), index
            into = torch.addmv if a.ndim == 1 else torch.addmm
            into(out[columns], tile.T, scaled[rows], out=out[columns])
        return out

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k, dequantised."""
        codes = torch.cat([blocks[:, k].flatten() for _, blocks in self._runs()])
        return quantization.dequantize(codes, self._scales[:, k], self.kind.block)

    def widen(self, extra: int) -> None:
        """The last block grows, others follow it; scales of blocks that were there stay."""
        old, (m, d) = self, self.shape
        wider = self.kind.build(m, d + extra, self._codes.device)
        assert isinstance(wider, Int8Rows)
        for index, start, stop in old._blocks():
            last = min(start + self.kind.block, d + extra)
            wider._block(start, last)[:, : stop - start] = old._block(start, stop)
            wider._scales[index] = old._scales[index]
        self._codes, self._scales, self.shape = wider._codes, wider._scales, wider.shape

    def state(self) -> dict[str, Any]:
        """Codes and scales, and how to read them."""
        kind = {"block": self.kind.block, "stochastic": self.kind.stochastic, "seed": self.kind.seed}
        parts = {"codes": self._codes, "scales": self._scales}
        return {"kind": "int8", **kind, "dim": self.shape[1], "written": self._written, **parts}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Int8Rows":
        """Reads a saved state, in its own memory."""
        kind = Int8(int(state["block"]), bool(state["stochastic"]), int(state["seed"]))
        return cls(kind, state["codes"], state["scales"], int(state["dim"]), int(state["written"]))

    def load(self, saved: SavedRows, n: int) -> bool:
        """Copies codes and scales that were made alike; quantises other rows anew."""
        if isinstance(saved, Int8Rows) and (saved.kind.block, saved.shape) == (self.kind.block, self.shape):
            self._codes.copy_(saved._codes)
            self._scales.copy_(saved._scales)
            self._written = saved._written
            return False
        device = self._codes.device
        check_fits(self, saved, n, lambda row: self.encode(row.to(device)))
        self._codes.zero_()
        self._scales.zero_()
        for k in range(n):
            self.write(k, self.encode(saved.row(k).to(device)))
        return True

    def _compiled(self, dtype: torch.dtype) -> native.NativeProducts | None:
        return native.find(dtype, self._codes, self.shape, self._scales, self.kind.block)

    def _noise(self) -> Float[Tensor, " d"] | None:
        """The draws of the next row, by how many were written: nothing is drawn in vain."""
        if not self.kind.stochastic:
            return None
        return quantization.draws(self.shape[1], self.kind.seed, self._written, self._codes.device)

    def _blocks(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(number, start, stop) of the blocks from column `first` to `end`, which is the last one where it is None."""
        block, d = self.kind.block, self.shape[1]
        for index in range(first // block, quantization.num_blocks(d if end is None else end, block)):
            yield index, index * block, min((index + 1) * block, d)

    def _runs(self) -> Iterator[tuple[int, Tensor]]:
        """Codes [blocks, m, length] of the whole blocks, and of the shorter one at the end, each with its start."""
        (m, d), block = self.shape, self.kind.block
        whole = d - d % block
        if whole:
            yield 0, self._codes[: m * whole].view(-1, m, block)
        if whole < d:
            yield whole, self._codes[m * whole :].view(1, m, d - whole)

    def _block(self, start: int, stop: int) -> Tensor:
        """Codes [m, stop - start] of one block; a view."""
        m = self.shape[0]
        return self._codes[m * start : m * stop].view(m, stop - start)

    def _tiles(self, n: int, dtype: torch.dtype) -> Iterator[tuple[int, slice, slice, Tensor]]:
        """Tiles of codes converted to `dtype`, one after the other in the same memory."""
        block = min(self.kind.block, self.shape[1])
        height = max(1, min(n, TILE // block))
        buffer = torch.empty(height * block, dtype=dtype, device=self._codes.device)
        for index, start, stop in self._blocks():
            codes = self._block(start, stop)[:n]
            for top in range(0, n, height):
                source = codes[top : top + height]
                tile = buffer[: source.numel()].view_as(source).copy_(source)
                yield index, slice(start, stop), slice(top, top + len(source)), tile

    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Columns of the first n rows, dequantised."""
        out = torch.empty(n, stop - start, device=self._codes.device)
        for index, left, right in self._blocks(start, stop):
            low, high = max(left, start), min(right, stop)
            part = out[:, low - start : high - start]
            part.copy_(self._block(left, right)[:n, low - left : high - left])
            part.mul_(self._scales[index, :n, None])
        return out

    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Single columns of the first n rows, dequantised."""
        (m, d), block = self.shape, self.kind.block
        index = indices // block
        lengths = (d - index * block).clamp_max(block)
        places = torch.arange(n, device=indices.device)[:, None] * lengths + (m - 1) * index * block + indices
        return self._codes[places].float().mul_(self._scales[index, :n].T)

"""Rows with their columns on several devices of one process: each multiplies its own, and only m numbers meet."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.windows.rows import ChosenColumns, Kind, Rows, SavedRows, StoredRow


def device_widths(kind: Kind, dim: int, count: int) -> list[int]:
    """How many columns each device gets: evenly, and in whole blocks of a compressed storage where there are enough, so
    that rows are stored as they would be on one device."""
    width, block = -(-dim // count), int(getattr(kind, "block", 1))
    if width > block:
        width = -(-width // block) * block
    return [min(width, dim - start) for start in range(0, dim, width)]


class DeviceRows(Rows):
    """Pieces of the columns, one per device, or as they were saved; vectors come and go on the first device."""

    def __init__(self, pieces: Sequence[Rows]):
        self.pieces = list(pieces)
        first = self.pieces[0]
        self.kind, self.dtype, self.device = first.kind, first.dtype, first.device
        self.widths = [piece.shape[1] for piece in self.pieces]
        self._spans = [(end - width, end) for width, end in zip(self.widths, accumulate(self.widths), strict=True)]
        self.shape = first.shape[0], self._spans[-1][1]

    def compiled(self, dtype: torch.dtype) -> bool:
        return any(piece.compiled(dtype) for piece in self.pieces)

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        stored = tuple(piece.encode(part) for piece, part in zip(self.pieces, self._split(g), strict=True))
        return StoredRow(self._join([each.dense for each in stored]), stored)

    def write(self, k: int, stored: StoredRow) -> None:
        for piece, part in zip(self.pieces, stored.parts, strict=True):
            piece.write(k, part)

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        parts = zip(self.pieces, self._split(x), strict=True)
        return self._sum([piece.project(n, part, dtype) for piece, part in parts])  # all devices work at once

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        return self._join([piece.combine(a.to(piece.device), dtype) for piece in self.pieces])

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        return self._sum([piece.gram(n, dtype) for piece in self.pieces])

    def row(self, k: int) -> Float[Tensor, " d"]:
        return self._join([piece.row(k) for piece in self.pieces])

    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        inside = [
            piece.columns(n, max(start, first) - first, min(stop, last) - first)
            for piece, (first, last) in zip(self.pieces, self._spans, strict=True)
            if first < stop and last > start
        ]
        return self._join(inside, dim=1)

    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        out = torch.empty(n, len(indices), dtype=self.dtype, device=self.device)
        for piece, (first, last) in zip(self.pieces, self._spans, strict=True):
            inside = (indices >= first) & (indices < last)
            out[:, inside] = piece.gather(n, (indices[inside] - first).to(piece.device)).to(out.device)
        return out

    def widened(self, extra: int) -> Rows:
        return DeviceRows([*self.pieces[:-1], self.pieces[-1].widened(extra)])

    def state(self) -> Tensor | dict[str, Any]:
        """A matrix, copied to the CPU, where all pieces are matrices; otherwise the states of the pieces."""
        states = [piece.state() for piece in self.pieces]
        matrices = [state.cpu() for state in states if isinstance(state, Tensor)]
        if len(matrices) == len(states):
            return torch.cat(matrices, 1)
        return {"kind": "pieces", "pieces": {str(number): state for number, state in enumerate(states)}}

    def load(self, saved: SavedRows, n: int) -> bool:
        """Piece by piece where they were cut alike; otherwise the columns of each piece from whole rows."""
        parts: Sequence[SavedRows] = [ChosenColumns(saved, [span]) for span in self._spans]
        if isinstance(saved, DeviceRows) and saved.widths == self.widths:
            parts = saved.pieces
        converted = [piece.load(part, n) for piece, part in zip(self.pieces, parts, strict=True)]
        return any(converted)

    def _split(self, x: Float[Tensor, "d *k"]) -> list[Tensor]:
        return [part.to(piece.device) for part, piece in zip(x.split(self.widths), self.pieces, strict=True)]

    def _join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        return torch.cat([part.to(self.device) for part in parts], dim)

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.to(self.device) for part in parts]).sum(0)

"""Which storage a `window` argument means, how much memory it takes, on one device or several; and saved rows read."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.memory import available_memory, check_count, gib
from mfac.windows.int8 import Int8, Int8Rows
from mfac.windows.plain import DTYPES, Plain, PlainRows
from mfac.windows.rows import ChosenColumns, Kind, Rows, SavedRows, StoredRow
from mfac.windows.topk import TopK, TopKRows

Window = torch.dtype | Int8 | TopK
SMALLER: tuple[Kind, ...] = (Plain(torch.bfloat16), Int8(), TopK())
READERS: dict[Any, Callable[[dict[str, Any]], Rows]] = {"int8": Int8Rows.of_state, "topk": TopKRows.of_state}


def as_kind(window: Window | Kind) -> Kind:
    """The storage that a `window` argument means; ValueError if there is none."""
    if isinstance(window, Int8 | TopK | Plain):
        return window
    if window == torch.int8:
        return Int8()
    if window in DTYPES:
        return Plain(window)
    raise ValueError(
        f"rows can be stored in {', '.join(map(str, DTYPES))}, torch.int8, mfac.Int8(...) or mfac.TopK(...), "
        f"not {window!r}"
    )


def as_devices(device: torch.device | str | None, devices: Sequence[torch.device | str] | None) -> list[torch.device]:
    """The devices of the columns, vectors being on the first; ValueError if both are given or the list is empty."""
    if devices is None:
        return [torch.empty(0, device=device).device]
    if device is not None:
        raise ValueError(f"give device={str(device)!r} or devices=[...], not both; vectors come and go on the first")
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices must be a list of at least one device, not {devices!r}")
    return [torch.empty(0, device=each).device for each in devices]


def window_bytes(num_grads: int, dim: int, window: Window | Kind) -> int:
    """Memory of a window: its rows, and four m x m matrices of float64 (Gram, inverse, the next inverse, a factor)."""
    check_count("num_grads", num_grads)
    return as_kind(window).bytes(num_grads, dim) + 4 * 8 * num_grads**2


def check_memory(num_grads: int, dim: int, kind: Kind, device: torch.device) -> None:
    """Raises MemoryError for a window that does not fit, with what would."""
    needed, available = window_bytes(num_grads, dim, kind), available_memory(device)
    if available is None or needed <= available:
        return

    def row(kind: Kind) -> int:
        return kind.bytes(1, dim) - kind.bytes(0, dim)

    def fitting(kind: Kind) -> int:  # rows, with m x m matrices as for `num_grads`
        return max(0, int((available - kind.bytes(0, dim)) / (row(kind) + 32 * num_grads)))

    smaller = [other for other in SMALLER if row(other) < row(kind) and fitting(other)]
    ways = [f", or {fitting(other)} of them with window={other.name}" for other in smaller]
    own = fitting(kind)
    advice = f"num_grads={own} would fit" if own else "not one would fit: mask weights, or use several devices"
    raise MemoryError(
        f"a window of {num_grads} gradients of {dim} weights in {kind.name} needs {gib(needed)} on {device} and "
        f"{gib(available)} are available; {advice}{''.join(ways)}"
    )


def build_rows(kind: Kind, num_grads: int, dim: int, devices: Sequence[torch.device]) -> Rows:
    """Rows of zeros, with their columns on one device or several; MemoryError where one has too little memory."""
    places = list(zip(device_widths(kind, dim, len(devices)), devices, strict=False))
    for width, device in places:
        check_memory(num_grads, width, kind, device)
    pieces = [kind.build(num_grads, width, device) for width, device in places]
    return pieces[0] if len(pieces) == 1 else DeviceRows(pieces)


def check_wider(rows: Rows, extra: int) -> None:
    """Raises MemoryError without room for `extra` more columns; the wider rows are made beside the present ones."""
    rows = rows.pieces[-1] if isinstance(rows, DeviceRows) else rows
    check_memory(rows.shape[0], rows.shape[1] + extra, rows.kind, rows.device)


def saved_rows(rows: Any) -> SavedRows:
    """Reads the rows of a state: a matrix, a list of pieces of its columns, or a dict; or `SavedRows` already."""
    if isinstance(rows, Tensor):
        return PlainRows(rows)
    if isinstance(rows, dict) and rows.get("kind") == "pieces":
        rows = [rows["pieces"][str(number)] for number in range(len(rows["pieces"]))]
    if isinstance(rows, list):
        pieces: list[Any] = [saved_rows(piece) for piece in rows]
        return DeviceRows(pieces)
    if isinstance(rows, SavedRows):
        return rows
    if rows.get("kind") not in READERS:
        raise ValueError(f"the saved rows are stored as {rows.get('kind')!r}, and {', '.join(READERS)} can be read")
    return READERS[rows["kind"]](rows)


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
        first, *others = [part.to(self.device) for part in parts]
        return sum(others, first)  # every entry in the same order: a Gram matrix stays symmetric, bit for bit

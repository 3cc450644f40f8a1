"""Rows whose columns are on several devices of one process: each multiplies its own, and only m numbers meet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.pages import Pages, SpreadPages
from mfac.windows.rows import ChosenColumns, Kind, Rows, SavedRows, StoredRow


def as_devices(device: torch.device | str | None, devices: Sequence[torch.device | str] | None) -> list[torch.device]:
    """Where the columns are to be, the first being where vectors come and go.

    Raises:
        ValueError: both are given, or the list is empty.
    """
    if devices is None:
        return [torch.empty(0, device=device).device]
    if device is not None:
        raise ValueError(f"give device={str(device)!r} or devices=[...], not both; vectors come and go on the first")
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices must be a list of at least one device, not {devices!r}")
    return [torch.empty(0, device=each).device for each in devices]


def device_widths(kind: Kind, dim: int, count: int) -> list[int]:
    """How many columns each device gets: as even as may be, and whole blocks of a compressed storage where there are
    enough; then rows are stored as they would be on one device."""
    width, block = -(-dim // count), int(getattr(kind, "block", 1))
    if width > block:
        width = -(-width // block) * block
    return [min(width, dim - start) for start in range(0, dim, width)]


@dataclass
class SplitRow(StoredRow):
    """A row on its way into several pieces."""

    pieces: tuple[StoredRow, ...] = ()


class SideBySide:
    """Saved rows that are pieces of the columns, each stored in its own way."""

    def __init__(self, pieces: Sequence[SavedRows]):
        self.pieces = list(pieces)
        self.kind = self.pieces[0].kind

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k over all pieces."""
        rows = [piece.row(k) for piece in self.pieces]
        return torch.cat([row.to(rows[0].device) for row in rows])


class DeviceRows:
    """Pieces of the columns, one a device; what has d numbers comes and goes on the first."""

    def __init__(self, pieces: Sequence[Rows], devices: Sequence[torch.device]):
        self.pieces = list(pieces)
        self.devices = list(devices)
        self.kind = self.pieces[0].kind
        self.dtype = self.pieces[0].dtype

    @property
    def widths(self) -> list[int]:
        """Columns of each piece."""
        return [piece.shape[1] for piece in self.pieces]

    @property
    def shape(self) -> tuple[int, int]:
        """(m, d)."""
        return self.pieces[0].shape[0], sum(self.widths)

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """Every piece of g, on its device."""
        stored = tuple(piece.encode(part) for piece, part in zip(self.pieces, self._split(g), strict=True))
        return SplitRow(self._join([each.dense for each in stored]), pieces=stored)

    def write(self, k: int, stored: StoredRow) -> None:
        """Row k of every piece."""
        assert isinstance(stored, SplitRow)
        for piece, part in zip(self.pieces, stored.pieces, strict=True):
            piece.write(k, part)

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        """G x: a sum over devices, which all work at once."""
        parts = zip(self.pieces, self._split(x), strict=True)
        return self._sum([piece.project(n, part, dtype) for piece, part in parts])

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        """Gᵀ a."""
        pairs = zip(self.pieces, self.devices, strict=True)
        return self._join([piece.combine(a.to(device), dtype) for piece, device in pairs])

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        """G Gᵀ: a sum over devices."""
        return self._sum([piece.gram(n, dtype) for piece in self.pieces])

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k, on the first device."""
        return self._join([piece.row(k) for piece in self.pieces])

    def dense(self) -> Float[Tensor, "m d"]:
        """All rows, on the first device: a matrix of its own."""
        return self._join([piece.dense() for piece in self.pieces], dim=1)

    def pages(self, n: int) -> SpreadPages:
        """Those of every device, side by side."""
        ends = list(accumulate(self.widths))
        pages = []
        for piece, width, end in zip(self.pieces, self.widths, ends, strict=True):
            page = piece.pages(n)
            assert isinstance(page, Pages)  # a piece is on one device
            page.first = end - width
            pages.append(page)
        return SpreadPages(pages, ends)

    def widen(self, extra: int) -> None:
        """On the last device."""
        self.pieces[-1].widen(extra)

    def state(self) -> Tensor | dict[str, Any]:
        """A matrix, copied to the CPU, where pieces are matrices; else the states of all pieces."""
        states = [piece.state() for piece in self.pieces]
        if all(isinstance(state, Tensor) for state in states):
            return torch.cat([state.cpu() for state in states if isinstance(state, Tensor)], 1)
        return {"kind": "pieces", "pieces": {str(number): state for number, state in enumerate(states)}}

    def load(self, saved: SavedRows, n: int) -> bool:
        """Piece by piece where they were cut alike; the columns of each piece from whole rows where not."""
        converted = [piece.load(part, n) for piece, part in zip(self.pieces, self._parts(saved), strict=True)]
        return any(converted)

    def _parts(self, saved: SavedRows) -> list[SavedRows]:
        if isinstance(saved, SideBySide):
            widths = [part.shape[1] for part in saved.pieces if hasattr(part, "shape")]
            if widths == self.widths:
                return saved.pieces
        stops = [sum(self.widths[: i + 1]) for i in range(len(self.pieces))]
        return [ChosenColumns(saved, [(stop - width, stop)]) for stop, width in zip(stops, self.widths, strict=True)]

    def _split(self, x: Float[Tensor, "d *k"]) -> list[Tensor]:
        return [part.to(device) for part, device in zip(x.split(self.widths), self.devices, strict=True)]

    def _join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        return torch.cat([part.to(self.devices[0]) for part in parts], dim)

    def _sum(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part.to(self.devices[0])
        return total


def build_on(
    kind: Kind, num_grads: int, dim: int, devices: Sequence[torch.device], check: Callable[[int, torch.device], None]
) -> Rows:
    """Rows of zeros on one device or several; `check(columns, device)` is asked before anything is allocated."""
    widths = device_widths(kind, dim, len(devices)) if len(devices) > 1 else [dim]
    devices = devices[: len(widths)]
    for width, device in zip(widths, devices, strict=True):
        check(width, device)
    pieces = [kind.build(num_grads, width, device) for width, device in zip(widths, devices, strict=True)]
    return pieces[0] if len(pieces) == 1 else DeviceRows(pieces, devices)

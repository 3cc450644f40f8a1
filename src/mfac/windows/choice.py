"""Which storage a `window` argument means, how much memory it takes, and how to read what was saved of any."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mfac.memory import available_memory, gib
from mfac.windows.devices import DeviceRows, SideBySide, build_on
from mfac.windows.int8 import Int8, Int8Rows
from mfac.windows.plain import DTYPES, Plain
from mfac.windows.rows import Kind, Pieces, Rows, SavedRows
from mfac.windows.topk import TopK, TopKRows

Window = torch.dtype | Int8 | TopK
SMALLER: tuple[Kind, ...] = (Plain(torch.bfloat16), Int8(), TopK())


def as_kind(window: Window) -> Kind:
    """The storage that is meant.

    Raises:
        ValueError: it is none.
    """
    if isinstance(window, Int8 | TopK):
        return window
    if window == torch.int8:
        return Int8()
    if window in DTYPES:
        return Plain(window)
    raise ValueError(
        f"rows can be stored in {', '.join(map(str, DTYPES))}, torch.int8, mfac.Int8(...) or mfac.TopK(...), "
        f"not {window!r}"
    )


def window_bytes(num_grads: int, dim: int, window: Window) -> int:
    """Memory of a window: its rows, and four m x m matrices of float64 (Gram, inverse, its successor, a factor)."""
    return as_kind(window).bytes(num_grads, dim) + 4 * 8 * num_grads**2


def check_memory(num_grads: int, dim: int, kind: Kind, device: torch.device) -> None:
    """Raises MemoryError, with what would fit, where a window does not."""
    needed, available = kind.bytes(num_grads, dim) + 32 * num_grads**2, available_memory(device)
    if available is None or needed <= available:
        return
    smaller = [other for other in SMALLER if _row_bytes(other, dim) < _row_bytes(kind, dim)]
    ways = [f"{_fitting(num_grads, dim, other, available)} of them with window={other.name}" for other in smaller]
    others = f", or {', or '.join(ways)}" if ways else ""
    raise MemoryError(
        f"a window of {num_grads} gradients of {dim} weights in {kind.name} needs {gib(needed)} on {device} and "
        f"{gib(available)} are available; num_grads={_fitting(num_grads, dim, kind, available)} would fit{others}"
    )


def build_rows(kind: Kind, num_grads: int, dim: int, devices: Sequence[torch.device]) -> Rows:
    """Rows of zeros, their columns on one device or several.

    Raises:
        MemoryError: a device has too little memory.
    """
    return build_on(kind, num_grads, dim, devices, lambda columns, at: check_memory(num_grads, columns, kind, at))


def check_wider(rows: Rows, extra: int, device: torch.device) -> None:
    """Raises MemoryError where there is no room for `extra` columns more, made beside the present ones."""
    if isinstance(rows, DeviceRows):
        device, rows = rows.devices[-1], rows.pieces[-1]
    check_memory(rows.shape[0], rows.shape[1] + extra, rows.kind, device)


def saved_rows(rows: Any) -> SavedRows:
    """Rows as they are in a state: a matrix, pieces of its columns, a dict of a compressed storage, or read already.

    Raises:
        ValueError: a dict of a storage that is not known.
    """
    if isinstance(rows, Tensor):
        rows = [rows]
    if isinstance(rows, list):
        return Pieces(rows, Plain(rows[0].dtype))
    if not isinstance(rows, dict):
        read: SavedRows = rows
        return read
    readers: dict[Any, Callable[[dict[str, Any]], SavedRows]]
    readers = {"int8": Int8Rows.of_state, "topk": TopKRows.of_state}
    if rows.get("kind") == "pieces":
        return _side_by_side(rows)
    if rows.get("kind") not in readers:
        raise ValueError(f"the saved rows are stored as {rows.get('kind')!r}, and {', '.join(readers)} can be read")
    return readers[rows["kind"]](rows)


def _side_by_side(state: dict[str, Any]) -> SavedRows:
    pieces = state["pieces"]
    return SideBySide([saved_rows(pieces[str(number)]) for number in range(len(pieces))])


def _fitting(num_grads: int, dim: int, kind: Kind, available: int) -> int:
    """How many rows fit, with m x m matrices as for `num_grads`."""
    return max(0, int((available - kind.bytes(0, dim)) / (_row_bytes(kind, dim) + 32 * num_grads)))


def _row_bytes(kind: Kind, dim: int) -> int:
    """What one more row takes."""
    return kind.bytes(1, dim) - kind.bytes(0, dim)

"""How the rows of a window are stored: plain dtypes, int8 with scales, or the largest entries with error feedback."""

from mfac.windows.int8 import Int8
from mfac.windows.rows import ChosenColumns, SavedRows
from mfac.windows.storage import Window, as_devices, as_kind, build_rows, check_wider, saved_rows, window_bytes
from mfac.windows.topk import TopK

__all__ = [
    "ChosenColumns",
    "Int8",
    "SavedRows",
    "TopK",
    "Window",
    "as_devices",
    "as_kind",
    "build_rows",
    "check_wider",
    "saved_rows",
    "window_bytes",
]

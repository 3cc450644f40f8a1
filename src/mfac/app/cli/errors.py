"""Errors of the commands, as one line."""

import errno
import sysconfig
import traceback
from pathlib import Path

from mfac.app.tasks import TaskError

KNOWN = (ValueError, OSError, ImportError, MemoryError, RuntimeError)
LIBRARIES = [Path(__file__).parents[2], *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))]


def explain(error: Exception) -> str:
    """What happened, where in the user's code, and what to do."""
    text = str(error) or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC:
            where = f" ({error.filename})" if error.filename else ""
            return f"the disk is full{where}; nothing is lost: free some space, and the same command resumes the run"
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    place = None if isinstance(error, TaskError) else _place(error)
    text = " ".join(text.split()) + (f" ({place})" if place else "")
    return text if isinstance(error, KNOWN) else f"{type(error).__name__}: {text}; --debug shows the traceback"


def _place(error: Exception) -> str | None:
    """file:line of the last call in a file that belongs neither to this package, nor to Python, nor to a library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(folder in path.parents for folder in LIBRARIES):
            return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{frame.lineno}"
    return None

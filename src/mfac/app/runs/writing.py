"""A full disk, said in one way: writers of other libraries report it in ways of their own."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever keeps the file from being written is an OSError that names it.

    Raises:
        OSError: with the number and the words of the system, where they can be found.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError | RuntimeError) and type(error).__name__ != "SafetensorError":
            raise
        number = _number(error)
        if number is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        raise OSError(number, os.strerror(number), str(path)) from error


def _number(error: BaseException | None) -> int | None:
    """The system's error number: of the error itself, in its text (safetensors), or of the one behind it (torch)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        found = re.search(r"os error (\d+)", str(error))
        if found:
            return int(found[1])
        error = error.__cause__ or error.__context__
    return None

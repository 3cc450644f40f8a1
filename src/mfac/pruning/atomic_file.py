"""Files that are there in full or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; it takes the place of `path` when the block ends, and vanishes when the block fails.

    Whoever reads `path` sees the old file or the new one, never a part of either, also if the machine goes down.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"{target}: the folder {target.parent} does not exist; make it first")
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield draft
        _settle(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _settle(path: Path) -> None:
    """Sees that the bytes are on the disk before the name points at them."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())

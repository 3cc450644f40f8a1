"""Files that are written completely or not at all."""

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to, which replaces `path` when the block ends, and is deleted if it fails."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"{target}: the folder {target.parent} does not exist; make it first")
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.touch()
        mode = draft.stat().st_mode  # as the umask has it; safetensors makes files that only their owner can read
        yield draft
        draft.chmod(mode)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())  # the bytes are on the disk before the name points at them
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def write_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, completely or not at all."""
    save_file = _safetensors("safetensors.torch").save_file
    with replacing(path) as draft:
        save_file(dict(tensors), draft, metadata=metadata)


def read_tensors(path: str | os.PathLike[str], writer: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that mfac.`writer` makes."""
    safetensors = _safetensors()
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist; it must be a safetensors file, such as mfac.{writer} writes")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); write it with mfac.{writer}") from None


def _safetensors(name: str = "safetensors") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("mask and compact files need safetensors; pip install 'torch-mfac[masks]'") from error

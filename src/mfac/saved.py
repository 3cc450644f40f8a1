"""What is saved: files written as a whole by one process at a time, and damage noticed while they are read."""

import hashlib
import importlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to, which replaces `path` when the block ends, and is deleted if it fails."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"{target}: the folder {target.parent} does not exist; create it first")
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


@contextmanager
def locked(lock: Path, what: object, remedy: str) -> Iterator[None]:
    """Holds a lock file that names this process, and ends with it however it ends; removes it afterwards.

    ValueError if another process, or another thread, holds it; says which.
    """
    import fcntl  # not on Windows, where the rest of the package can be imported

    while True:
        with open(lock, "a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read() or "another process"
                raise ValueError(f"{holder} is writing to {what}; wait for it, or {remedy}") from None
            if os.fstat(handle.fileno()).st_nlink == 0:
                continue  # its last holder has removed it in the meantime
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}")
            handle.flush()
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises ValueError, naming what is read, where an entry is missing or has another type or shape.

    A ValueError of the block itself passes as it is.
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{what} is damaged, or of another kind: {error} is missing; load another") from error
    except (json.JSONDecodeError, TypeError, AttributeError, LookupError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what} is damaged, or of another kind ({error}); load another") from error


def count_of(state: Mapping[str, Any], name: str, least: int = 0, most: float = float("inf")) -> int:
    """An entry that must be a whole number in a range."""
    value = state[name].item() if isinstance(state[name], Tensor) else state[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"an int from {least} to {most}" if most < float("inf") else f"an int of {least} or more"
        raise ValueError(f"the saved {name} must be {allowed}, not {value!r}; the state is damaged: load another")
    return value


def tensor_of(state: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """An entry that must be a tensor of a shape, of finite numbers."""
    value = state[name]
    if not isinstance(value, Tensor) or value.shape != shape or not bool(value.isfinite().all()):
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the saved {name} must be a tensor {list(shape)} of finite numbers, not {found} or with others; "
            "the state is damaged: load another"
        )
    return value


def digest(words: Iterable[str], values: Iterable[Tensor]) -> str:
    """A short word that differs where one of the words or of the numbers does."""
    hasher = hashlib.blake2b(digest_size=8)
    for word in words:
        hasher.update(word.encode() + b"\0")
    for value in values:
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().to_dense().cpu().contiguous().reshape(-1)
        hasher.update(plain.view(torch.uint8).numpy().data)
    return hasher.hexdigest()

"""Rows of gradients on disk: appended one by one, valid at any moment, read back by column pages."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mfac.row_formats import RowFormat, Storage, format_of, read_format

MAGIC = b"MFACROWS"
HEADER_BYTES = 4096


class GradientFile:
    """The matrix G in a file: a header of 4096 bytes, then the rows, all of one format and of as many bytes.

    The file is append-only and has no counter: the rows in it are those that are complete, and the torn tail that a
    killed process leaves is ignored by readers and cut off by the next `append`. So it is valid at any moment.

    Args:
        path: a file that `GradientFile.create` made.

    Raises:
        ValueError: the file is not one of ours.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        header = _read_header(self.path)
        self.num_grads: int = header["num_grads"]
        self.dim: int = header["dim"]
        self.fingerprint: str = header["fingerprint"]
        self._format = _known(read_format(header), self.path, header)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        num_grads: int,
        dim: int,
        dtype: torch.dtype | Storage = torch.float32,
        fingerprint: str = "",
    ) -> "GradientFile":
        """Makes an empty file that is to hold `num_grads` rows; an existing file is never overwritten.

        Args:
            path: of the file.
            num_grads: m.
            dim: d.
            dtype: how rows are stored: a floating-point dtype, torch.int8 or `Int8`, `TopK` (whose rows keep their
                largest numbers; the others are lost, and not given to the next row).
            fingerprint: anything, to be read back.
        """
        stored = format_of(dtype, dim).fields()
        fields = {"num_grads": num_grads, "dim": dim, **stored, "fingerprint": fingerprint}
        header = MAGIC + json.dumps(fields).encode()
        if len(header) > HEADER_BYTES:
            raise ValueError(
                f"the fingerprint is too long: the header has {HEADER_BYTES} bytes, this needs {len(header)}"
            )
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} exists already; delete it or choose another file")
        # Under another name first: a process killed here leaves no file with half a header.
        unnamed = path.with_name(path.name + ".new")
        unnamed.write_bytes(header.ljust(HEADER_BYTES))
        os.replace(unnamed, path)
        return cls(path)

    @property
    def rows(self) -> int:
        """How many complete rows there are now."""
        return min((os.path.getsize(self.path) - HEADER_BYTES) // self._row_bytes, self.num_grads)

    @property
    def shape(self) -> tuple[int, int]:
        """(complete rows, dim)."""
        return self.rows, self.dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are read: float32 where they are compressed on disk."""
        return self._format.dtype

    @property
    def storage(self) -> str:
        """How rows are stored, as it was asked for: "torch.bfloat16", "torch.int8", "mfac.TopK(0.01)"."""
        return self._format.name

    @property
    def _row_bytes(self) -> int:
        return self._format.row_bytes

    def append(self, rows: Tensor) -> None:
        """Writes one row [dim] or several [k, dim] behind the complete ones.

        Raises:
            ValueError: there is no room for them, or a compressed one would not be finite. Nothing is written.
        """
        rows = rows.reshape(-1, self.dim).cpu()
        done = self.rows
        if done + len(rows) > self.num_grads:
            raise ValueError(f"{self.path} holds {done} of {self.num_grads} rows; {len(rows)} more do not fit")
        encoded = self._format.encode(rows, done)
        with open(self.path, "r+b", buffering=0) as file:
            file.truncate(HEADER_BYTES + done * self._row_bytes)
            file.seek(0, os.SEEK_END)
            left = memoryview(_bytes_of(encoded).reshape(-1))
            while left:
                left = left[file.write(left) :]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start to stop - 1, as a tensor [stop - start, dim] on the CPU."""
        return self._read(range(start, stop), 0, self.dim)

    def read_columns(self, start: int, stop: int) -> Tensor:
        """Columns start to stop - 1 of every complete row, as a tensor [rows, stop - start] on the CPU."""
        return self._read(range(self.rows), start, stop)

    def gather_columns(self, indices: Tensor) -> Tensor:
        """Single columns of every complete row, as a tensor [rows, len(indices)] on the CPU."""
        mapped = np.memmap(self.path, np.uint8, "c", HEADER_BYTES, (self.rows, self._row_bytes))
        return self._format.gather(torch.from_numpy(mapped), indices.cpu())

    def _read(self, rows: range, start: int, stop: int) -> Tensor:
        spans = self._format.spans(start, stop) if stop > start else []
        parts = [torch.empty(len(rows), high - low, dtype=torch.uint8) for low, high in spans]
        buffers = [_bytes_of(part) for part in parts]
        with open(self.path, "rb", buffering=0) as file:
            for index, row in enumerate(rows):
                for (low, _), buffer in zip(spans, buffers, strict=True):
                    file.seek(HEADER_BYTES + row * self._row_bytes + low)
                    if file.readinto(buffer[index]) != buffer.shape[1]:
                        raise ValueError(f"{self.path} has no complete row {row}; it has {self.rows}")
        return self._format.decode(parts, start, stop) if parts else torch.empty(len(rows), 0, dtype=self.dtype)

    def __repr__(self) -> str:
        return f"GradientFile({str(self.path)!r}, rows={self.rows} of {self.num_grads}, dim={self.dim}, {self.storage})"


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.numpy()


def _known(found: RowFormat | None, path: Path, header: dict[str, Any]) -> RowFormat:
    if found is None:
        raise ValueError(
            f"{path} stores rows as {header.get('dtype')!r}, which this version does not know; update mfac"
        )
    return found


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise ValueError(f"{path} is not a gradient file (it should start with {MAGIC.decode()})")
    fields: dict[str, Any] = json.loads(header[len(MAGIC) :])
    return fields

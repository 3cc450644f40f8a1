"""Rows of gradients on disk: appended one at a time, valid at any moment, read back by columns."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mfac.memory import check_count
from mfac.precision import check_dense
from mfac.saved import count_of, reading, replacing

PathLike = str | os.PathLike[str]
MAGIC = b"MFACROWS"
HEADER_BYTES = 4096
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GradientFile:
    """The matrix G in a file that `GradientFile.create` made: a header of 4096 bytes, then the rows, all of one dtype.

    The file is append-only and has no counter: it holds the rows that are complete. The torn last row that a killed
    process leaves behind is ignored by readers and cut off by the next `append`.

    Raises:
        ValueError: the file is not a gradient file.
    """

    def __init__(self, path: PathLike):
        self.path = Path(path)
        header = _read_header(self.path)
        self.num_grads: int = header["num_grads"]
        self.dim: int = header["dim"]
        self.dtype: torch.dtype = DTYPES[header["dtype"]]
        self.fingerprint: str = header["fingerprint"]
        self._row_bytes = self.dim * self.dtype.itemsize

    @classmethod
    def create(
        cls, path: PathLike, num_grads: int, dim: int, dtype: torch.dtype = torch.float32, fingerprint: str = ""
    ) -> "GradientFile":
        """Creates an empty file for `num_grads` rows of `dim` numbers; never overwrites an existing file.

        The dtype is float32, float64, bfloat16 or float16; the fingerprint any text, to be read back.
        """
        check_count("num_grads", num_grads)
        check_count("dim", dim)
        names = {value: name for name, value in DTYPES.items()}
        if dtype not in names:
            raise ValueError(f"a gradient file stores {', '.join(DTYPES)}, not {dtype!r}; choose one of these dtypes")
        fields = {"num_grads": num_grads, "dim": dim, "dtype": names[dtype], "fingerprint": fingerprint}
        header = MAGIC + json.dumps(fields).encode()
        if len(header) > HEADER_BYTES:
            raise ValueError(
                f"the fingerprint is too long: the header has {HEADER_BYTES} bytes, this needs {len(header)}"
            )
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} exists already; delete it or choose another file")
        with replacing(path) as draft:  # a process killed here leaves no file with half a header
            draft.write_bytes(header.ljust(HEADER_BYTES))
        return cls(path)

    @property
    def rows(self) -> int:
        complete = (os.path.getsize(self.path) - HEADER_BYTES) // self._row_bytes
        return max(0, min(complete, self.num_grads))

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.dim

    @property
    def version(self) -> tuple[int, int]:
        """Another one after the file was written to."""
        found = os.stat(self.path)
        return found.st_mtime_ns, found.st_size

    def append(self, rows: Tensor) -> None:
        """Writes one row [dim] or several [k, dim] after the complete ones.

        Raises:
            ValueError: they do not fit, or the file's dtype cannot hold them. Nothing is written.
        """
        check_dense("rows", rows)
        if rows.ndim not in (1, 2) or rows.shape[-1] != self.dim:
            raise ValueError(f"rows must be [{self.dim}] or [k, {self.dim}], not {list(rows.shape)}")
        rows = rows.detach().to("cpu", self.dtype).reshape(-1, self.dim).contiguous()
        if not bool(rows.isfinite().all()):
            raise ValueError(f"rows have numbers that are not finite in {self.dtype}; leave them out, or scale them")
        done = self.rows
        if done + len(rows) > self.num_grads:
            raise ValueError(f"{self.path} holds {done} of {self.num_grads} rows; {len(rows)} more do not fit")
        with open(self.path, "r+b", buffering=0) as file:
            file.truncate(HEADER_BYTES + done * self._row_bytes)
            file.seek(0, os.SEEK_END)
            left = memoryview(_as_bytes(rows).reshape(-1))
            while left:
                left = left[file.write(left) :]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start to stop - 1, as a tensor [stop - start, dim] on the CPU."""
        _check_span("rows", start, stop, self.rows)
        return self._read(range(start, stop), 0, self.dim)

    def read_columns(self, start: int, stop: int) -> Tensor:
        """Columns start to stop - 1 of every complete row, as a tensor [rows, stop - start] on the CPU."""
        _check_span("columns", start, stop, self.dim)
        return self._read(range(self.rows), start, stop)

    def gather_columns(self, indices: Tensor) -> Tensor:
        """Single columns of every complete row, as a tensor [rows, len(indices)] on the CPU."""
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.dim:
            raise ValueError(f"columns are numbered from 0 to {self.dim - 1}, and indices are outside")
        if not self.rows:
            return torch.empty(0, len(indices), dtype=self.dtype, device="cpu")
        mapped = np.memmap(self.path, np.uint8, "c", HEADER_BYTES, (self.rows, self._row_bytes))
        return torch.from_numpy(mapped).view(self.dtype)[:, indices.cpu()]

    def _read(self, rows: range, start: int, stop: int) -> Tensor:
        out = torch.empty(len(rows), stop - start, dtype=self.dtype, device="cpu")
        buffer = _as_bytes(out)
        with open(self.path, "rb", buffering=0) as file:
            for index, row in enumerate(rows):
                file.seek(HEADER_BYTES + row * self._row_bytes + start * self.dtype.itemsize)
                if file.readinto(buffer[index]) != buffer.shape[1]:
                    raise ValueError(f"{self.path} has no complete row {row}; it has {self.rows}")
        return out

    def __repr__(self) -> str:
        return f"GradientFile({str(self.path)!r}, rows={self.rows} of {self.num_grads}, dim={self.dim}, {self.dtype})"


def _as_bytes(tensor: Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise ValueError(f"{path} is not a gradient file (it should start with {MAGIC.decode()})")
    with reading(f"the header of {path}"):
        fields: dict[str, Any] = json.loads(header[len(MAGIC) :])
        if fields["dtype"] not in DTYPES:
            raise ValueError(
                f"{path} stores rows as {fields['dtype']!r}, and this version reads {', '.join(DTYPES)}; "
                "collect the gradients again in one of these dtypes"
            )
        fields |= {name: count_of(fields, name, 1) for name in ("num_grads", "dim")}
        fields["fingerprint"] = str(fields["fingerprint"])
    return fields


def _check_span(what: str, start: int, stop: int, end: int) -> None:
    if not 0 <= start <= stop <= end:
        raise ValueError(f"there are {end} complete {what}, and {start} to {stop} are not among them")

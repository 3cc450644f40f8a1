"""How a row of gradients becomes bytes of a file, and how columns of many rows are read back from them.

Every row of a file takes the same number of bytes and depends on nothing but its gradient and its number, so that a
file can be cut off and gone on with at any row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mfac import quantization
from mfac.largest_entries import LONGEST_BLOCK, entry_blocks, largest, num_entries

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RowFormat(Protocol):
    """The bytes of a row."""

    @property
    def name(self) -> str:
        """As it was asked for: a dtype, or the storage of a window."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are read, which holds every stored number."""

    @property
    def row_bytes(self) -> int:
        """How many there are."""

    def fields(self) -> dict[str, Any]:
        """What `read_format` needs to know."""

    def encode(self, rows: Float[Tensor, "k d"], first: int) -> UInt8[Tensor, "k bytes"]:
        """The bytes of rows number `first`, `first` + 1, ..."""

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Which bytes of a row [from, to) are needed for the columns start to stop - 1."""

    def decode(self, spans: list[UInt8[Tensor, "n bytes"]], start: int, stop: int) -> Float[Tensor, "n columns"]:
        """The columns, from the bytes in their spans."""

    def gather(self, rows: UInt8[Tensor, "n bytes"], indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Single columns, from whole rows (which are on disk: only what is looked at is read)."""


class Storage(Protocol):
    """What stores the rows of a window, and of a file."""

    def row_format(self, dim: int) -> RowFormat:
        """The bytes of a row of so many columns."""


def format_of(dtype: object, dim: int) -> RowFormat:
    """The format that is meant by a dtype, or by a storage of windows.

    Raises:
        ValueError: it is neither.
    """
    names = {value: name for name, value in DTYPES.items()}
    if dtype in names:
        return PlainFormat(dim, names[dtype])
    if dtype == torch.int8:
        return Int8Format(dim)
    if hasattr(dtype, "row_format"):
        made: RowFormat = dtype.row_format(dim)
        return made
    raise ValueError(
        f"a gradient file stores {', '.join(DTYPES)}, int8, mfac.Int8(...) or mfac.TopK(...), not {dtype!r}; "
        "choose one of these"
    )


def read_format(fields: dict[str, Any]) -> RowFormat | None:
    """The format that `fields` describes; None where it is not known."""
    name, dim = fields.get("dtype"), int(fields["dim"])
    if name in DTYPES:
        return PlainFormat(dim, name)
    if name == "int8":
        return Int8Format(dim, fields["block"], fields["stochastic"], fields["seed"], fields["window"])
    if name == "topk":
        return TopKFormat(dim, fields["density"], fields["block"], DTYPES[fields["values"]], fields["window"])
    return None


@dataclass(frozen=True)
class PlainFormat:
    """Numbers of one floating-point dtype, side by side."""

    dim: int
    short_name: str

    @property
    def name(self) -> str:
        """The dtype's."""
        return str(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """That of the file."""
        return DTYPES[self.short_name]

    @property
    def row_bytes(self) -> int:
        """Those of the numbers."""
        return self.dim * self.dtype.itemsize

    def fields(self) -> dict[str, Any]:
        """The dtype."""
        return {"dtype": self.short_name}

    def encode(self, rows: Float[Tensor, "k d"], first: int) -> UInt8[Tensor, "k bytes"]:
        """The numbers, converted."""
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """One."""
        return [(start * self.dtype.itemsize, stop * self.dtype.itemsize)]

    def decode(self, spans: list[UInt8[Tensor, "n bytes"]], start: int, stop: int) -> Float[Tensor, "n columns"]:
        """The same memory."""
        return spans[0].view(self.dtype)

    def gather(self, rows: UInt8[Tensor, "n bytes"], indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Picks."""
        return rows.view(self.dtype)[:, indices]


@dataclass(frozen=True)
class Int8Format:
    """One float32 scale a block of columns, then one code a number."""

    dim: int
    block: int = 4096
    stochastic: bool = False
    seed: int = 0
    name: str = "torch.int8"
    dtype = torch.float32

    @property
    def row_bytes(self) -> int:
        """Scales and codes."""
        return self._head + self.dim

    @property
    def _head(self) -> int:
        return 4 * quantization.num_blocks(self.dim, self.block)

    def fields(self) -> dict[str, Any]:
        """The block and the draws."""
        drawn = {"stochastic": self.stochastic, "seed": self.seed}
        return {"dtype": "int8", "block": self.block, **drawn, "window": self.name}

    def encode(self, rows: Float[Tensor, "k d"], first: int) -> UInt8[Tensor, "k bytes"]:
        """Draws, where there are any, depend on the number of the row."""
        out = torch.empty(len(rows), self.row_bytes, dtype=torch.uint8)
        for number, row in enumerate(rows, first):
            noise = quantization.draws(self.dim, self.seed, number) if self.stochastic else None
            codes, scales = quantization.quantize(row, self.block, noise)
            _check_held(scales * quantization.LARGEST, number, self.name)
            out[number - first, : self._head] = scales.view(torch.uint8)
            out[number - first, self._head :] = codes.view(torch.uint8)
        return out

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Scales and codes."""
        last = quantization.num_blocks(stop, self.block)
        return [(4 * (start // self.block), 4 * last), (self._head + start, self._head + stop)]

    def decode(self, spans: list[UInt8[Tensor, "n bytes"]], start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Codes times scales, exact."""
        scales, out = spans[0].view(torch.float32), spans[1].view(torch.int8).float()
        low = start
        for k in range(scales.shape[1]):
            high = min((start // self.block + k + 1) * self.block, stop)
            out[:, low - start : high - start].mul_(scales[:, k, None])
            low = high
        return out

    def gather(self, rows: UInt8[Tensor, "n bytes"], indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Codes times scales."""
        scales = rows[:, : self._head].contiguous().view(torch.float32)
        codes = rows[:, indices + self._head].view(torch.int8)
        return codes.float().mul_(scales[:, indices // self.block])


@dataclass(frozen=True)
class TopKFormat:
    """The numbers of largest size in each block of columns, then their places in it (int16), both in the blocks' order.

    What is not kept is lost. A window hands it on to the next row, so that steps add up; the rows of a file are not
    steps, and each of them is to be the gradient of its own sample.
    """

    dim: int
    density: float = 0.01
    block: int = LONGEST_BLOCK
    values: torch.dtype = torch.bfloat16
    name: str = "mfac.TopK(0.01)"
    dtype = torch.float32

    @property
    def row_bytes(self) -> int:
        """Numbers and places."""
        return self._entries * (self.values.itemsize + 2)

    @property
    def _entries(self) -> int:
        return num_entries(self.dim, self.density, self.block)

    def fields(self) -> dict[str, Any]:
        """The density, the block and the dtype."""
        values = str(self.values).removeprefix("torch.")
        chosen = {"density": self.density, "block": self.block, "values": values}
        return {"dtype": "topk", **chosen, "window": self.name}

    def encode(self, rows: Float[Tensor, "k d"], first: int) -> UInt8[Tensor, "k bytes"]:
        """Places in ascending order within each block."""
        out = torch.empty(len(rows), self.row_bytes, dtype=torch.uint8)
        blocks = self._blocks(0, self.dim)
        starts = torch.cat([torch.full((entries.stop - entries.start,), left) for left, _, entries in blocks])
        for number, row in enumerate(rows.float(), first):
            columns = (largest(row, self.density, self.block) + starts).sort().values
            values = row[columns].to(self.values)
            _check_held(values, number, self.name)
            cut = values.nbytes
            out[number - first, :cut] = values.view(torch.uint8)
            out[number - first, cut:] = (columns - starts).to(torch.int16).view(torch.uint8)
        return out

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Numbers and places of the blocks that have these columns."""
        touched = list(self._blocks(start, stop))
        first, end = touched[0][2].start, touched[-1][2].stop
        size, cut = self.values.itemsize, self._entries * self.values.itemsize
        return [(size * first, size * end), (cut + 2 * first, cut + 2 * end)]

    def decode(self, spans: list[UInt8[Tensor, "n bytes"]], start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Zeros, but for what is kept."""
        values, places = spans[0].view(self.values), spans[1].view(torch.int16)
        out = torch.zeros(len(values), stop - start + 1)  # the last column takes what is outside
        first = next(self._blocks(start, stop))[2].start
        for left, _, entries in self._blocks(start, stop):
            here = slice(entries.start - first, entries.stop - first)
            columns = places[:, here].long() + (left - start)
            columns.masked_fill_((columns < 0) | (columns >= stop - start), stop - start)
            out.scatter_(1, columns, values[:, here].float())
        return out[:, :-1]

    def gather(self, rows: UInt8[Tensor, "n bytes"], indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Looks the columns up, block by block."""
        out = torch.zeros(len(rows), len(indices))
        for index in (indices // self.block).unique().tolist():
            left = index * self.block
            right = min(left + self.block, self.dim)
            inside = (indices // self.block == index).nonzero()[:, 0]
            wanted, where = indices[inside].unique(return_inverse=True)
            numbers, places = (rows[:, low:high].contiguous() for low, high in self.spans(left, right))
            columns = places.view(torch.int16).long() + left
            found = torch.searchsorted(wanted, columns).clamp_max_(len(wanted) - 1)
            found.masked_fill_(wanted[found] != columns, len(wanted))
            hits = torch.zeros(len(rows), len(wanted) + 1).scatter_(1, found, numbers.view(self.values).float())
            out[:, inside] = hits[:, where]
        return out

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, slice]]:
        return entry_blocks(self.dim, self.density, self.block, start, stop)


def _check_held(numbers: Float[Tensor, " n"], number: int, name: str) -> None:
    if not bool(torch.isfinite(numbers).all()):
        raise ValueError(
            f"row {number} is not finite in {name}; leave it out, or store it in a dtype of wider range: one such row "
            "would spoil every answer"
        )

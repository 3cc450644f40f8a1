"""Blocks of columns of G, the pieces they are streamed in, and how columns come to the device that computes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mfac.gradient_file import GradientFile
from mfac.memory import is_count
from mfac.products import spans

if TYPE_CHECKING:
    from mfac.windows.rows import Rows

# Numbers of G in one piece: a piece of many small blocks stays in cache, one of a large block is wide enough for matrix
# products, and one from disk is worth the reading.
BLOCK_PIECE = 1 << 20
WIDE_PIECE = 1 << 24
DISK_PIECE = 1 << 26

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks, in place, and returns it."""


@dataclass(frozen=True)
class BlockRun:
    """`count` adjacent blocks of `length` columns each, from column `start` on."""

    start: int
    length: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)

    def pieces(self, columns: int) -> Iterator["Piece"]:
        """Cuts the run into pieces of at most `columns` columns: whole blocks where they fit, else slices of one."""
        if self.length == 0:  # a rank may have no column of a block
            return
        if self.length <= columns:
            for blocks in spans(self.count, columns // self.length):
                first, last = (self.start + block * self.length for block in (blocks.start, blocks.stop))
                yield Piece(blocks, slice(first, last))
            return
        for block in range(self.count):
            end = self.start + (block + 1) * self.length
            for start in range(end - self.length, end, columns):
                yield Piece(slice(block, block + 1), slice(start, min(start + columns, end)))

    def parts(self, which: Sequence[bool]) -> Iterator[tuple[int, "BlockRun"]]:
        """The blocks with a True in `which`: (number of the first, run) of those that are adjacent."""
        for chosen, group in groupby(range(self.count), lambda block: which[block]):
            first, *others = group
            if chosen:
                yield first, BlockRun(self.start + first * self.length, self.length, 1 + len(others))


class Piece(NamedTuple):
    """Some columns of G: whole blocks of a run, or a slice of one block."""

    blocks: slice
    columns: slice

    def split_columns(self, G: Float[Tensor, "m columns"]) -> Float[Tensor, "blocks m length"]:
        """The columns of the piece, one matrix per block; a view."""
        return G.unflatten(1, (self.blocks.stop - self.blocks.start, -1)).transpose(0, 1)

    def split(self, x: Shaped[Tensor, "columns *k"]) -> Shaped[Tensor, "blocks length *k"]:
        """The entries of x in the piece, one vector (or matrix) per block; a view."""
        return x.unflatten(0, (self.blocks.stop - self.blocks.start, -1))


def block_runs(dim: int, block_size: int | None, sizes: Sequence[int] | None = None) -> list[BlockRun]:
    """Divides `dim` columns into blocks of `block_size` columns at most (None: one block).

    `sizes` are the lengths of the tensors that lie side by side in the columns; no block straddles two of them.
    """
    if block_size is None:
        if sizes is not None:
            raise ValueError("sizes was given without block_size; sizes only sets where blocks end: give both or none")
        return [BlockRun(0, dim, 1)]
    if not is_count(block_size):
        raise ValueError(f"block_size must be a positive int or None (the full matrix), not {block_size!r}")
    sizes = [dim] if sizes is None else [index(size) for size in sizes]
    if sum(sizes) != dim or min(sizes, default=0) < 0:
        found = f"one is {min(sizes)}" if min(sizes, default=0) < 0 else f"they add up to {sum(sizes)}"
        raise ValueError(f"sizes must be lengths of tensors that add up to the {dim} columns; {found}")
    parts = [part for size in sizes for part in ((block_size, size // block_size), (size % block_size, 1)) if all(part)]
    runs, start = list[BlockRun](), 0
    for length, adjacent in groupby(parts, itemgetter(0)):  # fewer, larger batches
        runs.append(BlockRun(start, length, sum(count for _, count in adjacent)))
        start = runs[-1].stop
    return runs


Pass = Callable[[], Iterator[tuple[Piece, Float[Tensor, "blocks m length"]]]]


@dataclass(frozen=True)
class MadeColumns:
    """A matrix [m, d] whose columns are made when they are asked for; a `GradientFile` reads its own."""

    shape: tuple[int, int]
    dtype: torch.dtype
    read_columns: Callable[[int, int], Float[Tensor, "m columns"]]
    gather_columns: Callable[[Int[Tensor, " n"]], Float[Tensor, "m n"]]


class Pages:
    """The columns of an m x d matrix, brought to `device`, `page_size` at once (None: `columns_at_once` chooses).

    A `window` multiplies all columns faster than pages of them could be made.
    """

    def __init__(
        self, source: Tensor | GradientFile | MadeColumns, device: torch.device, page_size: int | None = None,
        window: "Rows | None" = None,
    ):  # fmt: skip
        self.window = window
        self.source = source
        self.device = device
        self.dtype: torch.dtype = source.dtype
        self.shape: tuple[int, int] = (int(source.shape[0]), int(source.shape[1]))
        self._page_size = page_size
        self._watch = Watched(source)

    @property
    def in_place(self) -> bool:
        """Whether `load` gives a view of the source's own memory."""
        return isinstance(self.source, Tensor) and self.source.device == self.device

    def columns_at_once(self, run: BlockRun) -> int:
        """How many columns of a run are loaded at once."""
        m = self.shape[0]
        in_memory = WIDE_PIECE if run.length * m > BLOCK_PIECE else BLOCK_PIECE
        return self._page_size or max(1, (in_memory if self.in_place else DISK_PIECE) // m)

    def passes(self, run: BlockRun, which: Sequence[bool] | None = None) -> Iterator[tuple[slice, Pass]]:
        """Some blocks at a time, with a function that goes over their columns: whole blocks, or one block in slices.

        `which` chooses blocks of the run.
        """
        columns = self.columns_at_once(run)
        for first, part in [(0, run)] if which is None else run.parts(which):
            if part.length == 0:  # a rank without a column still takes part in the sums
                yield slice(0, 1), partial(iter, [])
            elif part.length <= columns and part.count > 1:
                for piece, G in self.stream(part.pieces(columns)):
                    yield slice(first + piece.blocks.start, first + piece.blocks.stop), partial(iter, [(piece, G)])
            else:
                for block, pieces in groupby(part.pieces(columns), lambda piece: piece.blocks.start):
                    yield slice(first + block, first + block + 1), partial(self.stream, list(pieces))

    def stream(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Float[Tensor, "blocks m length"]]]:
        """Every piece with its columns; the next piece is loaded while the caller works on this one."""
        if self.in_place:
            for piece in pieces:
                yield piece, piece.split_columns(self.load(piece.columns))
            return
        remaining = list(pieces)
        with ThreadPoolExecutor(1) as pool:
            loads = [pool.submit(self.load, piece.columns) for piece in remaining[:1]]
            for piece, following in zip_longest(remaining, remaining[1:]):
                if following is not None:
                    loads.append(pool.submit(self.load, following.columns))
                yield piece, piece.split_columns(loads.pop(0).result())  # only the caller holds it

    def load(self, columns: slice) -> Float[Tensor, "m columns"]:
        """The columns, on the device: a view if the matrix is there already, else a copy."""
        self._check_unchanged()
        if isinstance(self.source, Tensor):
            return self.source[:, columns].to(self.device, non_blocking=True)
        return self.source.read_columns(columns.start, columns.stop).to(self.device)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Single columns, on the device."""
        self._check_unchanged()
        if isinstance(self.source, Tensor):
            return self.source[:, indices.to(self.source.device)].to(self.device)
        return self.source.gather_columns(indices).to(self.device)

    def raise_for_rows(self, reduce: Reduce | None = None) -> NoReturn:
        """Raises the ValueError that names the rows to blame for a sum that is not finite."""
        squares = torch.zeros(self.shape[0], dtype=torch.float64, device=self.device)
        for piece in BlockRun(0, self.shape[1], 1).pieces(max(1, BLOCK_PIECE // self.shape[0])):
            squares += self.load(piece.columns).double().square().sum(1)
        squares = squares if reduce is None else reduce(squares)
        bad = (~torch.isfinite(squares)).nonzero()[:, 0].tolist()
        if not bad:
            raise ValueError(
                'the gradients are too large to be squared in float32; use precision="auto", or scale them down'
            )
        raise ValueError(
            f"gradients that are not finite (or too large to be squared) in {len(bad)} of {len(squares)} rows, the "
            f"first in row {bad[0]}; leave these out: a single one would spoil every answer"
        )

    def accept_changes(self) -> None:
        """Call this after writing to the source on purpose."""
        self._watch = Watched(self.source)

    def _check_unchanged(self) -> None:
        if self._watch.changed:
            raise RuntimeError(
                "the gradients were modified in place (or their file was) after the operator was built on them, which "
                "would make its answers wrong; build it anew, or give it a copy (grads.clone())"
            )


class Watched:
    """Notices whether a tensor or a file is written to from now on; a copy, or a pickle, goes on watching its own."""

    def __init__(self, source: object, changed: bool = False):
        # An inference tensor has no counter of its changes.
        self._source = None if isinstance(source, Tensor) and source.is_inference() else source
        self._version = -1 if changed else self._count()

    @property
    def changed(self) -> bool:
        return self._count() != self._version

    def __reduce__(self) -> tuple[Any, ...]:
        return Watched, (self._source, self.changed)

    def _count(self) -> object:
        if isinstance(self._source, GradientFile):
            return self._source.version
        return getattr(self._source, "_version", None)

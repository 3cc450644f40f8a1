"""Where the rows of G live, and how columns of them come to the device that computes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.blocks import Piece
from mfac.gradient_file import GradientFile

COLUMNS = 1 << 16


class Pages:
    """Columns of an m x d matrix that is in memory (here or on another device) or on disk.

    Args:
        source: a tensor [m, d] or a complete gradient file.
        device: where columns are wanted.
        first: the number of the source's first column, where it is a part of the matrix.
    """

    def __init__(self, source: Tensor | GradientFile, device: torch.device, first: int = 0):
        self.source = source
        self.device = device
        self.first = first
        self.dtype: torch.dtype = source.dtype
        self.shape: tuple[int, int] = (int(source.shape[0]), int(source.shape[1]))
        self._version = _version(source)

    @property
    def in_place(self) -> bool:
        """Whether `load` gives a view of the source's own memory."""
        return isinstance(self.source, Tensor) and self.source.device == self.device

    def stream(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Float[Tensor, "blocks m length"]]]:
        """Every piece with its columns; while one is worked on, the next one is already being loaded."""
        if self.in_place:
            for piece in pieces:
                yield piece, piece.split_columns(self.load(piece.columns))
            return
        with ThreadPoolExecutor(1) as pool:
            waiting: list[tuple[Piece, Future[Tensor]]] = []
            for piece in pieces:
                waiting.append((piece, pool.submit(self.load, piece.columns)))
                if len(waiting) == 2:
                    yield _loaded(waiting)
            if waiting:
                yield _loaded(waiting)

    def load(self, columns: slice) -> Float[Tensor, "m columns"]:
        """The columns, on the device: a view where the matrix is there already, a copy where it is not."""
        self._check_unchanged()
        start, stop = columns.start - self.first, columns.stop - self.first
        if isinstance(self.source, GradientFile):
            return self.source.read_columns(start, stop).to(self.device)
        return self.source[:, start:stop].to(self.device, non_blocking=True)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Single columns, on the device."""
        self._check_unchanged()
        indices = indices - self.first
        if isinstance(self.source, GradientFile):
            return self.source.gather_columns(indices).to(self.device)
        return self.source[:, indices.to(self.source.device)].to(self.device)

    def raise_for_rows(self) -> NoReturn:
        """Says which rows are to blame for a sum that is not finite."""
        _raise_for(self.row_squares())

    def row_squares(self) -> Float[Tensor, " m"]:
        """The squared norm of every row."""
        squares = torch.zeros(self.shape[0], dtype=torch.float64, device=self.device)
        end = self.first + self.shape[1]
        for start in range(self.first, end, COLUMNS):
            squares += self.load(slice(start, min(start + COLUMNS, end))).double().square().sum(1)
        return squares

    def accept_changes(self) -> None:
        """Takes the present content as meant: after we have written to it ourselves."""
        self._version = _version(self.source)

    def _check_unchanged(self) -> None:
        if _version(self.source) != self._version:
            raise RuntimeError(
                "the gradients were modified in place after the operator was built on them, which would make its "
                "answers wrong; build it anew, or give it a copy (grads.clone())"
            )


class SpreadPages:
    """The pages of several devices, each of which computes on a share of the columns.

    Pieces come on the device that has them; single columns, and whatever is summed, on the first one.

    Args:
        pages: of every device.
        ends: the columns behind the last one of each.
    """

    def __init__(self, pages: Sequence[Pages], ends: Sequence[int]):
        self._pages = list(pages)
        self._ends = list(ends)
        self.device = pages[0].device
        self.dtype: torch.dtype = pages[0].dtype
        self.shape: tuple[int, int] = (pages[0].shape[0], self._ends[-1])

    @property
    def in_place(self) -> bool:
        """Whether pieces are views of the source's own memory, everywhere."""
        return all(pages.in_place for pages in self._pages)

    def stream(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Float[Tensor, "blocks m length"]]]:
        """Every slice of a block with its columns; it is cut where it goes from one device to the next."""
        cut = ((index, part) for piece in pieces for index, part in self._cut(piece))
        for index, parts in groupby(cut, key=lambda pair: pair[0]):
            yield from self._pages[index].stream(part for _, part in parts)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Single columns."""
        out = torch.empty(self.shape[0], len(indices), dtype=self.dtype, device=self.device)
        owner = torch.bucketize(indices, torch.tensor(self._ends, device=indices.device), right=True)
        for index, pages in enumerate(self._pages):
            inside = owner == index
            out[:, inside.to(self.device)] = pages.gather(indices[inside]).to(self.device)
        return out

    def raise_for_rows(self) -> NoReturn:
        """Says which rows are to blame for a sum that is not finite."""
        _raise_for(torch.stack([pages.row_squares().to(self.device) for pages in self._pages]).sum(0))

    def accept_changes(self) -> None:
        """Takes the present content as meant: after we have written to it ourselves."""
        for pages in self._pages:
            pages.accept_changes()

    def _cut(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        start = 0
        for index, end in enumerate(self._ends):
            first, last = max(start, piece.start), min(end, piece.stop)
            if first < last:
                yield index, Piece(piece.first, piece.last, first, last)
            start = end


def _raise_for(squares: Float[Tensor, " m"]) -> NoReturn:
    bad = (~torch.isfinite(squares)).nonzero()[:, 0].tolist()
    if not bad:
        raise ValueError(
            'the gradients are too large to be squared in float32; use precision="auto", or scale them down'
        )
    raise ValueError(
        f"gradients that are not finite (or too large to be squared) in {len(bad)} of {len(squares)} rows, the "
        f"first in row {bad[0]}; leave these out: one of them would spoil every answer"
    )


def _loaded(waiting: list[tuple[Piece, "Future[Tensor]"]]) -> tuple[Piece, Tensor]:
    """The first of the pieces that were asked for, which nobody but the caller holds from then on."""
    piece, future = waiting.pop(0)
    return piece, piece.split_columns(future.result())


def _version(source: Tensor | GradientFile) -> int | None:
    """A counter that changes when the tensor is written to; None where there is none."""
    if isinstance(source, GradientFile) or source.is_inference():
        return None
    return source._version

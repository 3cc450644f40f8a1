"""Where the rows of G live, and how columns of them come to the device that computes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
    """

    def __init__(self, source: Tensor | GradientFile, device: torch.device):
        self.source = source
        self.device = device
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
            yield _loaded(waiting)

    def load(self, columns: slice) -> Float[Tensor, "m columns"]:
        """The columns, on the device: a view where the matrix is there already, a copy where it is not."""
        self._check_unchanged()
        if isinstance(self.source, GradientFile):
            return self.source.read_columns(columns.start, columns.stop).to(self.device)
        return self.source[:, columns].to(self.device, non_blocking=True)

    def gather(self, indices: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
        """Single columns, on the device."""
        self._check_unchanged()
        if isinstance(self.source, GradientFile):
            return self.source.gather_columns(indices).to(self.device)
        return self.source[:, indices.to(self.source.device)].to(self.device)

    def raise_for_rows(self) -> NoReturn:
        """Says which rows are to blame for a sum that is not finite."""
        squares = torch.zeros(self.shape[0], dtype=torch.float64, device=self.device)
        for start in range(0, self.shape[1], COLUMNS):
            squares += self.load(slice(start, min(start + COLUMNS, self.shape[1]))).double().square().sum(1)
        bad = (~torch.isfinite(squares)).nonzero()[:, 0].tolist()
        raise ValueError(
            f"gradients that are not finite (or too large to be squared) in {len(bad)} of {self.shape[0]} rows, the "
            f"first in row {bad[0]}; leave these out: one of them would spoil every answer"
        )

    def accept_changes(self) -> None:
        """Takes the present content as meant: after we have written to it ourselves."""
        self._version = _version(self.source)

    def _check_unchanged(self) -> None:
        if _version(self.source) != self._version:
            raise RuntimeError(
                "the gradients were modified in place after the operator was built on them, which would make its "
                "answers wrong; build it anew, or give it a copy (grads.clone())"
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

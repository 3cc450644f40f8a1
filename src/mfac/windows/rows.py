"""The interface that all storages of a window share, and rows that are read from a saved state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.pages import Pages


class Kind(Protocol):
    """A way to store rows, as users name it; equal kinds store equal rows alike."""

    @property
    def name(self) -> str:
        """What to pass as `window`, for messages."""

    def bytes(self, num_grads: int, dim: int) -> int:
        """Memory of `num_grads` rows, with everything they share."""

    def build(self, num_grads: int, dim: int, device: torch.device) -> "Rows":
        """Rows of zeros."""


@dataclass
class StoredRow:
    """A row about to be written: the numbers it will read back as, and what is stored of it."""

    dense: Float[Tensor, " d"]
    parts: tuple[Any, ...] = ()


class SavedRows(Protocol):
    """Rows of a saved state, read one by one."""

    @property
    def kind(self) -> Kind: ...

    def row(self, k: int) -> Float[Tensor, " d"]: ...


class Rows(Protocol):
    """The m x d matrix G as stored. Every answer is exact for these numbers, not for those they were made from."""

    @property
    def kind(self) -> Kind: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `row` and `pages`, which holds every stored number."""

    @property
    def shape(self) -> tuple[int, int]:
        """(m, d)."""

    def compiled(self, dtype: torch.dtype) -> bool:
        """Whether products with a vector in `dtype` are made by compiled code."""

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """What `write` would store; nothing changes. A number that the storage cannot hold is not finite in it."""

    def write(self, k: int, stored: StoredRow) -> None: ...

    # Products with the first n rows, computed in `dtype`: G x and G Gᵀ are returned in float64, Gᵀ a in `dtype`.

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]: ...

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]: ...

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]: ...

    def row(self, k: int) -> Float[Tensor, " d"]: ...

    def dense(self) -> Float[Tensor, "m d"]:
        """All rows: the storage's own memory where that is a matrix, a new matrix otherwise."""

    def pages(self, n: int) -> Pages:
        """The first n rows, by columns."""

    def widened(self, extra: int) -> "Rows":
        """These rows with `extra` columns of zeros behind the others."""

    def state(self) -> Tensor | dict[str, Any]:
        """Everything to save, in the storage's own memory: a matrix, or a dict that `saved_rows` can read."""

    def load(self, saved: SavedRows, n: int) -> bool:
        """Takes over n saved rows; returns whether they had to be converted.

        Raises:
            ValueError: a row has numbers that this storage cannot hold. Nothing has changed.
        """


class SideBySide:
    """Saved rows that are pieces of the columns, each with its own storage."""

    def __init__(self, pieces: Sequence[SavedRows]):
        self.pieces = list(pieces)
        self.kind = self.pieces[0].kind

    def row(self, k: int) -> Float[Tensor, " d"]:
        rows = [piece.row(k) for piece in self.pieces]
        return torch.cat([row.to(rows[0].device) for row in rows])


class ChosenColumns:
    """Saved rows with their columns in another order, and zeros where columns are missing.

    Args:
        saved: the rows.
        spans: (start, stop) of saved columns, or a number of zeros.
    """

    def __init__(self, saved: SavedRows, spans: Sequence[tuple[int, int] | int]):
        self.kind = saved.kind
        self._saved = saved
        self._spans = spans

    def row(self, k: int) -> Float[Tensor, " d"]:
        row = self._saved.row(k)
        return torch.cat([row.new_zeros(span) if isinstance(span, int) else row[slice(*span)] for span in self._spans])


def check_fits(rows: Rows, saved: SavedRows, n: int, encode: Callable[[Tensor], StoredRow]) -> None:
    """Raises ValueError where a saved row has numbers that `rows` cannot hold."""
    for k in range(n):
        stored = encode(saved.row(k))
        if not bool(torch.linalg.vector_norm(stored.dense, dtype=torch.float64).isfinite()):
            raise ValueError(
                f"row {k} of the saved window, stored in {saved.kind.name}, has numbers that {rows.kind.name} cannot "
                "hold; load it into a window of a wider range, such as window=torch.bfloat16"
            )

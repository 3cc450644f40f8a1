"""How the rows of a window are stored: one interface, so that who computes with them never asks which kind it has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.pages import Pages, SpreadPages


class Kind(Protocol):
    """A way to store rows, as users name it; equal kinds store equal rows alike."""

    @property
    def name(self) -> str:
        """For messages: what to pass as `window`."""

    def bytes(self, num_grads: int, dim: int) -> int:
        """Memory of `num_grads` rows, and of what belongs to all of them."""

    def build(self, num_grads: int, dim: int, device: torch.device) -> "Rows":
        """Rows of zeros."""


@dataclass
class StoredRow:
    """A row on its way into the window: the numbers it will read back as, and what will hold them."""

    dense: Float[Tensor, " d"]
    parts: tuple[Tensor, ...] = ()


class SavedRows(Protocol):
    """Rows that were saved, to be read one by one."""

    @property
    def kind(self) -> Kind:
        """How they were stored."""

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k, as it was stored."""


class Rows(Protocol):
    """The m x d matrix G as stored. Whatever is computed is exact for these numbers, not for those they came from."""

    @property
    def kind(self) -> Kind:
        """How they are stored."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `row` and `pages` give, which holds every stored number."""

    @property
    def shape(self) -> tuple[int, int]:
        """(m, d)."""

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """What `write` would store; nothing changes. A number that the storage cannot hold is not finite in it."""

    def write(self, k: int, stored: StoredRow) -> None:
        """Row k becomes what `encode` gave."""

    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        """G x for the first n rows: computed in `dtype`, in float64."""

    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        """Gᵀ a over the first n rows, in `dtype`."""

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        """G Gᵀ of the first n rows: computed in `dtype`, in float64."""

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k, as stored."""

    def dense(self) -> Float[Tensor, "m d"]:
        """All rows, as stored: their own memory where they are a matrix, a new one where they are not."""

    def pages(self, n: int) -> Pages | SpreadPages:
        """The first n rows, by columns."""

    def widen(self, extra: int) -> None:
        """`extra` columns of zeros behind the others."""

    def state(self) -> Tensor | dict[str, Any]:
        """All there is to save, in the rows' own memory: a matrix, or a dict that `saved_rows` can read."""

    def load(self, saved: SavedRows, n: int) -> bool:
        """Takes over n saved rows, converted where they were stored otherwise, and says whether they were.

        Raises:
            ValueError: a row has numbers that this storage cannot hold. Nothing has changed.
        """


class Pieces:
    """Saved rows that are matrices: pieces of the columns, side by side."""

    def __init__(self, pieces: Sequence[Tensor], kind: Kind):
        self.pieces = list(pieces)
        self.kind = kind

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k over all pieces."""
        device = self.pieces[0].device
        return torch.cat([piece[k].to(device) for piece in self.pieces])


class ChosenColumns:
    """Saved rows in another order of columns: spans of them, and zeros where there is none.

    Args:
        saved: the rows.
        spans: (start, stop) of columns of theirs, or how many zeros.
    """

    def __init__(self, saved: SavedRows, spans: Sequence[tuple[int, int] | int]):
        self.kind = saved.kind
        self._saved = saved
        self._spans = spans

    def row(self, k: int) -> Float[Tensor, " d"]:
        """Row k, its spans one behind the other."""
        row = self._saved.row(k)
        return torch.cat([row.new_zeros(span) if isinstance(span, int) else row[slice(*span)] for span in self._spans])


def check_fits(rows: Rows, saved: SavedRows, n: int, encode: Callable[[Tensor], StoredRow] | None = None) -> None:
    """Raises ValueError where a saved row has numbers that `rows` cannot hold."""
    for k in range(n):
        stored = (encode or rows.encode)(saved.row(k))
        if not bool(torch.linalg.vector_norm(stored.dense, dtype=torch.float64).isfinite()):
            raise ValueError(
                f"row {k} of the saved window, stored in {saved.kind.name}, has numbers that {rows.kind.name} cannot "
                "hold; load it into a window of a wider range, such as window=torch.bfloat16"
            )

"""The interface that all storages of a window share, and rows that are read from a saved state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products
from mfac.pages import WIDE_PIECE, MadeColumns, Pages
from mfac.windows.native import Stored


class Kind(Protocol):
    """A way to store rows, as users name it; equal kinds store equal rows alike."""

    @property
    def name(self) -> str:
        """What to pass as `window`, for messages."""

    def bytes(self, num_grads: int, dim: int) -> int: ...

    def build(self, num_grads: int, dim: int, device: torch.device) -> "Rows":
        """Rows of zeros."""


@dataclass
class StoredRow:
    """A row about to be written: the numbers it will read back as, and what is stored of it."""

    dense: Float[Tensor, " d"]
    parts: tuple[Any, ...] = ()


class Rows(ABC):
    """The m x d matrix G as stored. Every answer is exact for these numbers, not for those they were made from.

    Products are with the first n rows, computed in `dtype`: Gx and GGᵀ are returned in float64, Gᵀa in `dtype`.
    """

    kind: Kind
    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32  # of rows and columns that are read; holds every stored number
    device: torch.device
    _stored: Stored | None = None  # for products by compiled code

    def compiled(self, dtype: torch.dtype) -> bool:
        """Whether products with a vector in `dtype` are made by compiled code."""
        return self._stored is not None and self._stored.compiled(dtype)

    @abstractmethod
    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        """What `write` would store; nothing changes. A number that the storage cannot hold is not finite in it."""

    @abstractmethod
    def write(self, k: int, stored: StoredRow) -> None: ...

    @abstractmethod
    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]: ...

    @abstractmethod
    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]: ...

    def gram(self, n: int, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        parts = products.spans(self.shape[1], max(1, products.TILE // n))
        pieces = (self.columns(n, part.start, part.stop) for part in parts)
        return sum((products.gram(piece, dtype) for piece in pieces), torch.zeros((), device=self.device))

    @abstractmethod
    def row(self, k: int) -> Float[Tensor, " d"]: ...

    @abstractmethod
    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        """Single columns of the first n rows."""

    def columns(self, n: int, start: int, stop: int) -> Float[Tensor, "n columns"]:
        """Consecutive columns of the first n rows: a view where the storage is a matrix, new memory otherwise."""
        return self.gather(n, torch.arange(start, stop, device=self.device))

    def pages(self, n: int) -> Pages:
        """The first n rows, by columns."""
        made = MadeColumns((n, self.shape[1]), self.dtype, partial(self.columns, n), partial(self.gather, n))
        return Pages(made, self.device, max(1, WIDE_PIECE // n), self)

    @abstractmethod
    def widened(self, extra: int) -> "Rows":
        """These rows with `extra` columns of zeros behind the others."""

    @abstractmethod
    def state(self) -> Tensor | dict[str, Any]:
        """Everything to save, in the storage's own memory: a matrix, or a dict that `saved_rows` can read."""

    @abstractmethod
    def load(self, saved: "SavedRows", n: int) -> bool:
        """Takes over n saved rows, which `check` has passed; returns whether they had to be converted."""

    def check(self, saved: "SavedRows", n: int) -> Float[Tensor, " n"]:
        """The squared norms of n saved rows; ValueError if one of them does not fit. Nothing changes."""
        squares = torch.zeros(n, dtype=torch.float64, device=self.device)  # a list of tensors would break up the heap
        for k in range(n):
            row = saved.row(k)
            if row.shape != self.shape[1:]:
                found = f"a saved row has {list(row.shape)} numbers for {self.shape[1]} weights"
                raise ValueError(f"{found}; the state is damaged")
            squares[k] = products.squared_norm(row, torch.float64)
            dense = row if saved.kind == self.kind else self.encode(row.to(self.device)).dense
            if not bool(torch.linalg.vector_norm(dense, dtype=torch.float64).isfinite()):
                raise ValueError(
                    f"row {k} of the saved window, stored in {saved.kind.name}, has numbers that {self.kind.name} "
                    "cannot hold; load it into a window of a wider range, such as window=torch.bfloat16"
                )
        return squares

    def _store(self, saved: "SavedRows", n: int, encode: Callable[[Tensor], StoredRow]) -> None:
        for k in range(n):
            self.write(k, encode(saved.row(k).to(self.device)))


class ChosenColumns:
    """Saved rows with their columns in another order; a span is a (start, stop) of them, or a number of zeros."""

    def __init__(self, saved: "SavedRows", spans: Sequence[tuple[int, int] | int]):
        self.kind: Kind = saved.kind
        self._saved = saved
        self._spans = spans

    def row(self, k: int) -> Float[Tensor, " d"]:
        row = self._saved.row(k)
        return torch.cat([row.new_zeros(span) if isinstance(span, int) else row[slice(*span)] for span in self._spans])


SavedRows = Rows | ChosenColumns
"""Rows of a saved state, read one by one."""

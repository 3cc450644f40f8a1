"""The interface of all inverse-Fisher operators: a symmetric positive definite d x d matrix that is never formed."""

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from mfac.dual import DualBlocks
from mfac.gradient_file import GradientFile
from mfac.memory import available_memory, gib
from mfac.precision import check_dense
from mfac.primal import PrimalBlocks
from mfac.products import P, Value

Blocks = DualBlocks | PrimalBlocks


def unrecorded(method: Callable[P, Value]) -> Callable[P, Value]:
    """Without autograd, and outside of inference mode: what is kept there could not be changed after it."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class InverseFisher(ABC):
    """F⁻¹ of the damped empirical Fisher matrix F = λ I + (1/m) Σ g gᵀ over m gradients g.

    `num_grads` is m, or the capacity of a window that gradients enter one by one. Answers carry no autograd graph.
    Products have the dtype of the vector, diagonals and elements that of the operator.
    """

    _ranks: "Ranks"
    _shared = True  # whether the ranks share one block, which sums over them itself

    def __init__(self, num_grads: int, dim: int, damping: float, dtype: torch.dtype, device: torch.device):
        self.num_grads = num_grads
        self.dtype = dtype
        self.device = device
        self._dim = dim
        self._damping = check_damping(damping, dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self._dim, self._dim

    @property
    def damping(self) -> float:
        """λ. Assigning to it keeps the gradients and repeats only the m x m algebra if possible."""
        return self._damping

    @damping.setter
    @unrecorded
    def damping(self, damping: float) -> None:
        old, self._damping = self._damping, check_damping(damping, self.dtype)
        try:
            self._refactor(old)
        except Exception:
            self._damping = old
            raise

    @unrecorded
    def __matmul__(self, x: Float[Tensor, "d *k"]) -> Float[Tensor, "d *k"]:
        """F⁻¹ x for a vector [d] or the columns of a matrix [d, k]."""
        self._check_vector(x)
        # Of several ranks, one may have no block at all.
        return torch.cat([x[:0], *self._ask(lambda blocks: blocks.apply(x[blocks.run.columns]))])

    def __rmatmul__(self, x: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """x F⁻¹ for a vector [d] or the rows of a matrix [k, d]."""
        return (self @ x.T).T if isinstance(x, Tensor) and x.ndim == 2 else self @ x

    @property
    def T(self) -> "InverseFisher":
        """The operator itself: F⁻¹ is symmetric."""
        return self

    @unrecorded
    def solve(self, x: Float[Tensor, "d *k"]) -> Float[Tensor, "d *k"]:
        """The y with F⁻¹ y = x, that is F x: for a vector [d] or the columns of a matrix [d, k]."""
        self._check_vector(x)
        return torch.cat([x[:0], *self._ask(lambda blocks: blocks.forward(x[blocks.run.columns]))])

    @unrecorded
    def quadratic_form(self, x: Float[Tensor, "d *k"]) -> Float[Tensor, "*k"]:
        """xᵀ F⁻¹ x, never negative: a scalar for [d], a vector [k] for the columns of [d, k]."""
        self._check_vector(x)
        columns = x if x.ndim == 2 else x[:, None]
        found = self._ask(lambda blocks: blocks.quadratic_form(columns[blocks.run.columns]))
        result = self._total(found, columns.shape[1:]).to(x.dtype)
        return result if x.ndim == 2 else result[0]

    @unrecorded
    def diagonal(self) -> Float[Tensor, " d"]:
        """[F⁻¹]_ii for every i, each between 1/F_ii and 1/λ."""
        none = torch.empty(0, dtype=self.dtype, device=self.device)
        return torch.cat([none, *self._ask(lambda blocks: blocks.diagonal().to(self.dtype))])

    @unrecorded
    def __getitem__(self, index: tuple[Any, Any]) -> Tensor:
        """[F⁻¹]_ij: a 0-d tensor for two ints; index tensors of one shape give that shape."""
        if not isinstance(index, tuple) or len(index) != 2:
            raise IndexError("an element has two indices: op[i, j], with ints or with index tensors of one shape")
        rows, columns = (self._check_index(i) for i in index)
        if rows.shape != columns.shape:
            raise IndexError(
                f"index tensors must have one shape, not {list(rows.shape)} and {list(columns.shape)}; "
                "expand them first, for instance by torch.broadcast_tensors"
            )
        shape, rows, columns = rows.shape, rows.reshape(-1), columns.reshape(-1)
        out = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)  # also between blocks

        def fill(blocks: Blocks) -> None:
            run = blocks.run
            inside = (rows >= run.start) & (rows < run.stop) & (columns >= run.start) & (columns < run.stop)
            out[inside] = blocks.elements(rows[inside] - run.start, columns[inside] - run.start)

        self._ask(fill)
        return out.to(self.dtype).reshape(shape)

    __array_ufunc__ = None  # x @ op of an array is ours to refuse, with what to convert it by
    __iter__ = None  # else Python would call op[0], op[1], ... and take the IndexError for the end

    @unrecorded
    def logdet(self) -> Float[Tensor, ""]:
        """log det F⁻¹, over all ranks; in float64: it grows with d, and differences would have no digits in float32."""
        return self._total(self._ask(lambda blocks: blocks.logdet()), ())

    def trace(self) -> Float[Tensor, ""]:
        """tr F⁻¹, in float64; over all ranks."""
        return self._ranks.sum_(self.diagonal().double().sum())

    @abstractmethod
    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "InverseFisher":
        """The operator with its rows on another device or in another dtype, built anew; None leaves either as it is."""

    def as_scipy(self) -> Any:
        """F⁻¹ as a `scipy.sparse.linalg.LinearOperator` on float64 arrays, for solvers such as `eigsh`."""
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError as error:
            raise ImportError("op.as_scipy() needs scipy; pip install 'torch-mfac[scipy]'") from error

        def apply(x: Any) -> Any:
            real = x.astype(float, casting="same_kind")  # TypeError for complex numbers
            return (self @ torch.as_tensor(real, device=self.device)).cpu().numpy()

        return LinearOperator(self.shape, matvec=apply, rmatvec=apply, matmat=apply, rmatmat=apply, dtype=float)

    def to_dense(self) -> Float[Tensor, "d d"]:
        """F⁻¹ as a d x d tensor, if d is small; on one rank only."""
        if self._ranks.size > 1:
            raise ValueError(
                f"{self._ranks.size} ranks share the columns, and no rank can have the dense matrix; use op @ x, "
                "op.diagonal(), or op[i, j] between weights of this rank"
            )
        needed, available = 3 * self._dim**2 * self.dtype.itemsize, available_memory(self.device)
        if available is not None and needed > available:
            raise MemoryError(
                f"the dense {self._dim} x {self._dim} matrix takes {gib(needed)} to make and {gib(available)} are "
                "available; use op @ x, op.diagonal() or op[i, j], which never form it"
            )
        dense = self @ torch.eye(self._dim, dtype=self.dtype, device=self.device)
        return (dense + dense.T) / 2

    @abstractmethod
    def _ask(self, question: Callable[[Blocks], Any]) -> list[Any]:
        """The answers of all blocks of this rank, in order."""

    def _total(self, values: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The sum over all blocks of all ranks."""
        total = sum(values, torch.zeros(shape, dtype=torch.float64, device=self.device))
        return total if self._shared else self._ranks.sum_(total)

    @abstractmethod
    def _refactor(self, old_damping: float) -> None:
        """Adapts the state to `self._damping`; on failure it is unchanged."""

    @abstractmethod
    def _held_rows(self) -> tuple[Tensor | GradientFile, Float[Tensor, " m"]]:
        """The rows g_i that the operator was built on, and new weights c: F = λI + Σ c_i g_i g_iᵀ; or ValueError."""

    @abstractmethod
    def _whole(self) -> Blocks:
        """The one block that the full matrix is; ValueError if only diagonal blocks are kept."""

    def _check_vector(self, x: Tensor) -> None:
        check_dense("x", x)
        if x.ndim not in (1, 2) or x.shape[0] != self._dim:
            raise ValueError(f"x must be [{self._dim}] or [{self._dim}, k], not {list(x.shape)}")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}, the operator on {self.device}; move it with x.to(op.device)")
        if x.grad_fn is not None:
            raise ValueError("x is part of an autograd graph, and answers carry none; pass x.detach()")

    def _check_index(self, index: Any) -> Int[Tensor, "*n"]:
        if isinstance(index, slice) or index is None or index is Ellipsis:
            raise IndexError("slices are not supported; use ints or index tensors (op.to_dense() for a small matrix)")
        index = torch.as_tensor(index, device=self.device)
        if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool):
            raise IndexError(f"indices must be integers, not {index.dtype}")
        index = index.long()
        outside = (index < -self._dim) | (index >= self._dim)
        if bool(outside.any()):
            raise IndexError(f"index {int(index[outside][0])} is out of range for {self._dim} weights")
        return torch.where(index < 0, index + self._dim, index)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(d={self._dim}, num_grads={self.num_grads}, damping={self.damping:g}, "
            f"{self.dtype}, device={str(self.device)!r})"
        )


def check_damping(damping: float, dtype: torch.dtype = torch.float64) -> float:
    """λ as a float; ValueError unless it is positive and finite, and so is 1/λ in the dtype of the answers."""
    try:
        value = math.nan if isinstance(damping, bool) else float(damping + 0)  # a TypeError for text
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"damping must be a positive number, not {damping!r}") from None
    if not 0 < value < math.inf:
        raise ValueError(f"damping must be positive and finite, not {damping}; 1e-5 is a common choice")
    if value * torch.finfo(dtype).max < 1:
        raise ValueError(f"damping {value:g} is too small: answers grow to 1/damping, which {dtype} cannot hold")
    return value


def one_thread(method: Callable[P, Value]) -> Callable[P, Value]:
    """Refuses a second thread while one is in such a method of the same object."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Value:
        used, me = args[0].__dict__, threading.get_ident()
        nested = used.get("_thread") == me
        if used.setdefault("_thread", me) != me:  # atomic, and nothing that a copy or a pickle would have to keep
            way = "let it finish first, or give each thread a copy.deepcopy"
            raise RuntimeError(f"another thread is using this {type(args[0]).__name__}; {way}")
        try:
            return method(*args, **kwargs)
        finally:
            if not nested:
                del used["_thread"]

    return guarded


class Ranks:
    """The processes that share a matrix by its columns. This is one process alone: nothing is ever sent.

    `mfac.distributed.groups.GroupRanks` does the same over the ranks of a process group.
    """

    group: dist.ProcessGroup | None = None
    rank = 0
    size = 1

    def sum_(self, values: Tensor) -> Tensor:
        """Replaces `values` by their sum over all ranks, bit for bit the same on each, and returns them."""
        return values

    def gather(self, piece: Tensor) -> Tensor:
        """Stacks the pieces of all ranks, which have one shape."""
        return piece[None]

    def exchange(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Sends pieces[r] to rank r; returns what each rank sent here, with the given lengths."""
        return list(pieces)

    def from_first_(self, values: Tensor) -> Tensor:
        """Replaces `values` by those of the first rank, and returns them."""
        return values

    def tell(self, value: Value) -> list[Value]:
        """The values of all ranks, in order; anything that can be pickled."""
        return [value]

    def agree_on(self, values: Mapping[str, object]) -> None:
        """Raises ValueError on every rank if one of the {description: value} differs between ranks."""

    def together(self, what: str) -> AbstractContextManager[None]:
        """A block of code that fails on every rank if it fails on one; nothing may be sent inside."""
        return nullcontext()


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a process group; None, or a group of one rank, is this process alone."""
    if group is None or dist.get_world_size(group) == 1:
        return Ranks()
    from mfac.distributed.groups import GroupRanks

    return GroupRanks(group)

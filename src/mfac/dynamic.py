"""The dynamic operator: a sliding window of gradients, one replaced at a time."""

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from mfac import precision as judge
from mfac.dual import DualBlocks
from mfac.inverse_fisher import Blocks, InverseFisher, check_damping, one_thread, ranks_of, unrecorded
from mfac.memory import check_count
from mfac.pages import BlockRun
from mfac.precision import Precision
from mfac.products import gram, squared_norm
from mfac.saved import count_of, reading, tensor_of
from mfac.sliding import SlidingInverse
from mfac.windows.plain import DTYPES
from mfac.windows.storage import Window, as_devices, as_kind, build_rows, check_wider, saved_rows

Normalize = Literal["seen", "full", "sum"]


class NonFiniteGradientError(RuntimeError):
    """A gradient that is not finite and was kept out of the window."""


class DynamicInverseFisher(InverseFisher):
    """F⁻¹ over a window of the last m gradients: F = λ I + (1/k) Σ g gᵀ, with k = min(seen, m), or m, or 1.

    An update costs one pass over the window and O(m²). `update_and_apply` costs one pass more and is the optimizer's
    step: F⁻¹g = k Gᵀ S⁻¹ e, with nothing subtracted from g.

    Args:
        num_grads: m, the capacity of the window; `num_seen` is how many rows it holds.
        dim: d.
        damping: λ.
        dtype: of diagonals and elements, and of the rows unless `window` says otherwise.
        device: of the window.
        normalize: "seen" divides by the number of gradients in the window, "full" by m from the start, "sum" by 1.
        window: how rows are stored: a dtype, torch.int8 or `Int8`, `TopK`; answers are exact for the rows as stored.
        precision: of products with the window: "float32", "float64", or "auto": float32 where that is safe.
        process_group: each of its ranks holds a piece of the columns. `dim` is the width of this rank's piece; vectors,
            diagonals and indices are of that piece, and all ranks call the same methods in the same order. An update
            sends m numbers.
        devices: of this process, each of which holds a piece of the columns; vectors are expected on the first.

    One thread at a time can use it: answers refresh what it remembers. A second one gets a RuntimeError.

    Raises:
        ValueError: an argument out of its range.
        MemoryError: the window is larger than the memory.
    """

    @unrecorded
    def __init__(
        self,
        num_grads: int,
        dim: int,
        damping: float = 1e-5,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        normalize: Normalize = "seen",
        window: Window | None = None,
        precision: Precision = "auto",
        process_group: ProcessGroup | None = None,
        devices: Sequence[torch.device | str] | None = None,
    ):
        self._ranks = ranks_of(process_group)
        arguments = {"num_grads": num_grads, "damping": damping, "dtype": dtype, "normalize": normalize}
        self._ranks.agree_on({"the window": {**arguments, "window": window, "precision": precision}})
        with self._ranks.together("building the window"):
            check_count("num_grads", num_grads)
            check_count("dim", dim)
            judge.check_precision(precision)
            if normalize not in ("seen", "full", "sum"):
                raise ValueError(f"normalize must be 'seen', 'full' or 'sum', not {normalize!r}")
            if dtype not in DTYPES:
                raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype!r}")
            kind, places = as_kind(dtype if window is None else window), as_devices(device, devices)
            super().__init__(num_grads, dim, damping, dtype, places[0])
            self._rows = build_rows(kind, num_grads, dim, places)
        self._normalize = normalize
        self._precision = precision
        self._inverse = SlidingInverse(num_grads, self.device)
        self._updates = 0  # ever made by `update`
        self._rough: set[int] = set()  # rows whose products with the others were computed in float32
        self._sensitive = False
        self._snapshot: DualBlocks | None = None

    @property
    def num_seen(self) -> int:
        return self._inverse.size

    @property
    def compiled(self) -> bool:
        """Whether compiled code makes the products with the window; torch makes them otherwise (docs/windows.md)."""
        return self._rows.compiled(self._update_dtype(self._rows.dtype))

    @unrecorded
    def update(self, g: Float[Tensor, " d"]) -> None:
        """Replaces the oldest gradient by g: row t mod m, after t updates.

        Raises:
            ValueError: g has another shape or device, or is not floating-point.
            NonFiniteGradientError: a RuntimeError; g is not finite. The window is unchanged.
        """
        self._exchange(self._updates % self.num_grads, g)
        self._updates += 1

    @unrecorded
    def replace(self, k: int, g: Float[Tensor, " d"]) -> None:
        """Replaces row k by g; the order of later updates stays the same. Raises as `update` does, and IndexError."""
        k = index(k)
        if not 0 <= k < self.num_seen:
            raise IndexError(f"there is no row {k} to be replaced: the window holds {self.num_seen} (add with update)")
        self._exchange(k, g)

    @unrecorded
    def update_and_apply(self, g: Float[Tensor, " d"], average: float = 0.0) -> Float[Tensor, " d"]:
        """`update(g)`, then F⁻¹ of the row as stored: k Gᵀ S⁻¹ e, the push-through form; or, with an `average` β, of
        the average of all rows, with weights β^age / Σ.

        Raises:
            torch.linalg.LinAlgError: a RuntimeError; the damping is too small for these gradients, even in float64. The
                window is unchanged. Otherwise as `update`.
        """
        if not 0 <= average <= 1:
            raise ValueError(f"average must be a weight from 0 (none) to 1, not {average!r}")
        k = self._updates % self.num_grads
        self._exchange(k, g, settle=True)
        self._updates += 1
        coefficients = self._inverse.column(k, self._divisor(self.num_seen))
        if average:
            weights = average ** ((k - torch.arange(self.num_seen, device=self.device)) % self.num_grads).double()
            coefficients = self._inverse.solve(weights * (self._divisor(self.num_seen) / weights.sum()))
        return self._rows.combine(coefficients, self._update_dtype(g.dtype)).to(g.dtype)

    @unrecorded
    def combine(self, coefficients: Float[Tensor, " n"]) -> Float[Tensor, " d"]:
        """Gᵀc: the sum of the rows in the window, each times its coefficient."""
        if coefficients.shape[:1] != (self.num_seen,):
            raise ValueError(f"coefficients must be [{self.num_seen}], one a row, not {list(coefficients.shape)}")
        return self._rows.combine(coefficients, self._update_dtype(self.dtype))

    @one_thread
    @unrecorded
    def widen(self, extra: int) -> None:
        """Appends `extra` weights, whose gradients so far are zero.

        Raises:
            MemoryError: the wider window does not fit beside the present one.
        """
        check_count("extra", extra)
        check_wider(self._rows, extra)
        self._rows = self._rows.widened(extra)
        self._dim, self._snapshot = self._dim + extra, None

    @property
    def rows(self) -> Float[Tensor, "m d"]:
        """G as stored, with zeros in empty rows: the window's own memory; of compressed rows a new float32 matrix."""
        return self._rows.columns(self.num_grads, 0, self._dim)

    @property
    def gram(self) -> Float[Tensor, "n n"]:
        """G Gᵀ of the rows in the window, in float64; a view of the operator's own memory."""
        return self._inverse.K[: self.num_seen, : self.num_seen]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DynamicInverseFisher":
        options: dict[str, Any] = {"precision": self._precision, "normalize": self._normalize}
        options["window"] = self._rows.kind if dtype is None else dtype
        options |= {"device": self.device if device is None else device, "process_group": self._ranks.group}
        other = DynamicInverseFisher(self.num_grads, self._dim, self.damping, dtype=dtype or self.dtype, **options)
        other.load_state_dict(self.state_dict())
        return other

    def state_dict(self) -> dict[str, Any]:
        """The whole state, always with the same entries, as checkpoints that load in place require.

        The rows are the window's own memory: save the state, or deep-copy it, before the next update.
        """
        rough = torch.zeros(self.num_grads, dtype=torch.bool, device="cpu")
        rough[list(self._rough)] = True
        return {
            "num_grads": self.num_grads,
            "dim": self._dim,
            "normalize": self._normalize,
            "damping": self.damping,
            "updates": max(self._updates, self.num_seen),  # unequal if Ctrl-C came between the two
            "rows": self._rows.state(),
            **self._inverse.state(),
            "rough": rough,
            "sensitive": self._sensitive,
        }

    @one_thread
    @unrecorded
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a saved state. Rows of another storage are converted, and their products recomputed.

        `rows` may also be a list of tensors, pieces of the columns side by side; or `SavedRows`.

        Raises:
            ValueError: the state is of another window, its rows do not match its products, or they have numbers that
                this storage cannot hold. Nothing has changed.
        """
        with self._ranks.together("reading the state"), reading("the state of the window"):
            for name, value in {"num_grads": self.num_grads, "dim": self._dim, "normalize": self._normalize}.items():
                if state[name] != value:
                    raise ValueError(
                        f"the state was saved with {name}={state[name]!r}, this window has {name}={value!r}; build the "
                        "operator with the saved value"
                    )
            damping, n = check_damping(state["damping"], self.dtype), count_of(state, "num_seen", 0, self.num_grads)
            updates = count_of(state, "updates", n, n if n < self.num_grads else math.inf)
            rough = tensor_of(state, "rough", (self.num_grads,)).nonzero().flatten().tolist()
            fresh = SlidingInverse.of_state(state, self.num_grads, self.device, self._divisor(n) * damping)
            saved, sensitive = saved_rows(state["rows"]), bool(state["sensitive"])
            squares = self._rows.check(saved, n)
        if n and not torch.allclose(self._ranks.sum_(squares), fresh.K.diagonal()[:n], rtol=1e-3, atol=0):
            raise ValueError(
                "the saved rows do not match the saved products: the window was updated after state_dict(), whose rows "
                "are its own memory (or another rank's state was loaded); save or deep-copy it before the next update"
            )
        converted = any(self._ranks.tell(self._rows.load(saved, n)))
        self._damping, self._updates, self._inverse = damping, updates, fresh
        self._rough, self._sensitive, self._snapshot = set(range(n) if converted else rough), sensitive, None
        if converted:
            self._polish()

    def _divisor(self, seen: int) -> int:
        return {"seen": seen, "full": self.num_grads, "sum": 1}[self._normalize]

    @one_thread
    def _exchange(self, k: int, g: Float[Tensor, " d"], settle: bool = False) -> None:
        """Row k becomes g, or nothing changes; one host sync, for the checks. `settle`: F⁻¹g is going to be asked."""
        self._check_gradient(g)
        stored = self._rows.encode(g.detach())
        n = max(self.num_seen, k + 1)
        dtype = self._update_dtype(self._rows.dtype)
        column = self._products(n, k, stored.dense, dtype)
        before, rough, sensitive, accepted = self._inverse.remember(k), self._rough.copy(), self._sensitive, False
        try:
            square, sensitivity = self._inverse.replace(k, column, self._divisor(n) * self.damping)
            if not square < judge.LARGE_SQUARE and dtype == torch.float32:  # and perhaps not beyond float64
                exact = self._ranks.sum_(squared_norm(stored.dense, torch.float64))
                square = float(exact) if self._precision == "auto" else math.inf
            if not square < math.inf:
                raise NonFiniteGradientError(
                    f"the gradient is not finite (its squared norm in {self._rows.kind.name} is {square}), and the "
                    "window is unchanged: skip this step, or lower the learning rate"
                )
            (self._rough.add if dtype == torch.float32 else self._rough.discard)(k)
            if settle and self._inverse.inverse is None:
                sensitivity = self._factored(k)
            if self._precision == "auto" and (sensitivity or square > judge.LARGE_SQUARE):
                self._sensitive = judge.is_sensitive(sensitivity, self._sensitive) or square > judge.LARGE_SQUARE
                if self._sensitive and self._rough:
                    self._polish(k, stored.dense)
                    sensitivity = self._factored(k) if settle else 0.0
            if settle and sensitivity == math.inf:
                raise self._inverse.too_few_digits("float32" if self._rough else "float64")
            self._snapshot, accepted = None, True
            self._rows.write(k, stored)
        except BaseException:
            if accepted:  # Ctrl-C in the middle of the row
                self._rows.write(k, stored)
            else:
                self._inverse.recall(k, before)
                self._rough, self._sensitive = rough, sensitive
            raise

    def _products(self, n: int, k: int, row: Float[Tensor, " d"], dtype: torch.dtype) -> Float[Tensor, " n"]:
        """The products of n rows with one that takes the place of row k."""
        column = self._rows.project(n, row, dtype)
        column[k] = squared_norm(row, dtype)
        return self._ranks.sum_(column)

    def _factored(self, k: int) -> float:
        """Factors S and returns the sensitivity of S⁻¹e_k, infinite where rounding left S indefinite."""
        try:
            self._inverse.settle()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return math.inf
        return self._inverse.sensitivity(k)

    def _update_dtype(self, vector: torch.dtype) -> torch.dtype:
        """For products that only enter the push-through form."""
        least = torch.float64 if self._sensitive else torch.float32
        return judge.product_dtype(self._precision, vector, self.dtype, least)

    def _polish(self, coming: int | None = None, g: Float[Tensor, " d"] | None = None) -> None:
        """Recomputes the products of the rough rows in float64; g is the row that is about to become row `coming`."""
        n, K = self.num_seen, self._inverse.K.clone()  # what `remember` returned keeps the old one
        if 2 * len(self._rough) > n:
            K[:n, :n] = self._ranks.sum_(self._rows.gram(n, torch.float64))
        else:
            for k in sorted(self._rough - {coming}):
                K[:n, k] = K[k, :n] = self._products(n, k, self._rows.row(k), torch.float64)
        if coming is not None and g is not None:
            K[:n, coming] = K[coming, :n] = self._products(n, coming, g, torch.float64)
        self._rough.clear()
        self._snapshot = None
        self._inverse.K = K
        self._inverse.reset()

    @one_thread
    def _ask(self, question: Callable[[Blocks], Any]) -> list[Any]:
        return [question(self._frozen())]

    @one_thread
    def set_damping(self, damping: float) -> None:
        """Assigns λ without factoring: where it is too small, the next answer raises and not this call."""
        self._damping, self._snapshot = check_damping(damping, self.dtype), None
        self._inverse.reset(self._divisor(max(self.num_seen, 1)) * self.damping)

    @one_thread
    def _refactor(self, old_damping: float) -> None:
        self.set_damping(self.damping)
        try:
            self._frozen()
        except Exception:
            self.set_damping(old_damping)
            raise

    def _whole(self) -> DualBlocks:
        self._held_rows()
        return self._frozen()

    def _frozen(self) -> DualBlocks:
        """The present window as static blocks; remembered until it changes."""
        if self._snapshot is None:
            n = max(self.num_seen, 1)  # an empty window has a row of zeros
            weights, reduce = self._inverse.K.new_full((n,), 1 / self._divisor(n)), self._ranks.sum_
            self._snapshot = DualBlocks(
                BlockRun(0, self._dim, 1), self._rows.pages(n), self.damping,
                "float64" if self._precision == "auto" and self.dtype == torch.float64 else self._precision,
                weights, self._known_gram, reduce=reduce if self._ranks.size > 1 else None,
            )  # fmt: skip
        return self._snapshot

    def _known_gram(self, dtype: torch.dtype) -> tuple[Float[Tensor, "1 n n"], float | Tensor]:
        """G Gᵀ, as exact as products in a dtype, and its error, measured on some rows where they were in float32."""
        n = max(self.num_seen, 1)
        if dtype == torch.float64 and self._precision == "auto" and self._rough:
            self._polish()
        K = self._inverse.K[None, :n, :n].clone()
        if not self._rough:
            return K, judge.gram_error(n)
        sample = judge.sample(n)
        rows = torch.stack([self._rows.row(k) for k in range(n)[sample]])
        exact = self._ranks.sum_(gram(rows, torch.float64))
        return K, judge.measured_error(K, exact[None], sample)

    def _held_rows(self) -> tuple[Tensor, Float[Tensor, " n"]]:
        if self.num_seen == 0:
            raise ValueError("the window holds no gradient yet; add some with update")
        return self.rows[: self.num_seen], self.gram.new_full((self.num_seen,), 1 / self._divisor(self.num_seen))

    def _check_gradient(self, g: Tensor) -> None:
        judge.check_dense("a gradient", g)
        if g.shape != (self._dim,):
            raise ValueError(f"a gradient must be [{self._dim}], not {list(g.shape)}")
        if g.device != self.device:
            raise ValueError(f"the gradient is on {g.device}, the window on {self.device}; move it with .to(op.device)")

"""The inverse of the m x m dual matrix, kept up to date while rows of the window are replaced.

Where m is small, the time of an update is that of calling some forty operations. They are made in numpy then, which
takes a fifth of torch's time for each; the formulas are the same for tensors and arrays.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mfac import woodbury
from mfac.precision import EPS64, PRODUCT_TOLERANCE, sensitivity
from mfac.saved import count_of, tensor_of

# One refinement squares the relative error, and a step multiplies the rest by its sensitivity. A product with any
# vector subtracts nearly all of it again, and needs the accuracy of a Cholesky. Beyond these the inverse is recomputed.
DRIFT_LIMIT = 1e-6
STEP_ERROR = 1e-8
SOLVE_DRIFT = 1e-8
LEAST_REFRESH = 64
CANCELLED = 1e-13  # a sum of float64 that is this small beside its terms has no digits left
SMALL = 96  # up to this m updates are made in numpy: 16 % of a step at m = 64, d = 25,000, and 43 % at d = 5,000

Array = TypeVar("Array", Tensor, np.ndarray)


class SlidingInverse:
    """S⁻¹ for S = shift · I + K, all in float64, where K is the Gram matrix of the rows that a window holds.

    Replacing a row in a full window is a rank-2 update of S⁻¹, O(m²). The inverse is recomputed by a Cholesky after
    every max(m, 64) replacements (amortized O(m²) each), and at once when an update shows drift; every answer is
    refined by its residual. While the window fills, or when the shift changes, a Cholesky factor is used instead.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.K = torch.zeros(capacity, capacity, dtype=torch.float64, device=device)
        self._in_numpy = capacity <= SMALL and device.type == "cpu"
        self._lifetime = max(capacity, LEAST_REFRESH)
        self.size = 0
        self.shift = 1.0
        self.age = 0
        self.inverse: Tensor | None = None  # S⁻¹; None where only a factor is held, or nothing yet
        self._spare: Tensor | None = None
        self.L: Tensor | None = None  # solves where it is held, with other last digits than the inverse
        self._column: tuple[int, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {
            "num_seen": self.size,
            "gram": self.K.clone(),
            "inverse": torch.zeros_like(self.K) if self.inverse is None else self.inverse.clone(),
            "inverse_held": self.inverse is not None,
            "factor_held": self.L is not None,
            "age": self.age,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], capacity: int, device: torch.device, shift: float) -> "SlidingInverse":
        """Reads what `state` returned; ValueError where it is damaged."""
        read = cls(capacity, device)
        read.K.copy_(tensor_of(state, "gram", (capacity, capacity)))
        inverse = tensor_of(state, "inverse", (capacity, capacity))
        read.size, read.age, read.shift = count_of(state, "num_seen", 0, capacity), count_of(state, "age"), shift
        if state["inverse_held"]:
            read.inverse = inverse.to(device, torch.float64, copy=True).contiguous()
        if state["factor_held"]:
            read.factor()
        return read

    def reset(self, shift: float | None = None) -> None:
        """Forgets everything derived from K, after K or the shift has changed."""
        self.shift = self.shift if shift is None else shift
        self.inverse = self.L = self._column = None

    def remember(self, k: int) -> tuple[dict[str, Any], Tensor]:
        """What `recall` needs to take back a replacement of row k."""
        return vars(self).copy(), self.K[k].clone()

    def recall(self, k: int, before: tuple[dict[str, Any], Tensor]) -> None:
        vars(self).update(before[0])
        self.K[k] = self.K[:, k] = before[1]

    def replace(self, k: int, column: Float[Tensor, " n"], shift: float) -> tuple[float, float]:
        """Puts `column`, the products of the new row k with all n rows, into K.

        `column` is overwritten. The updated inverse is kept unless it has drifted or is due to be recomputed. Returns
        the squared norm of the new row, and the sensitivity of S⁻¹e_k (zero where no inverse was held); one host sync.
        """
        K, others = self._array(self.K), self._array(column)
        n = len(others)
        K[k, :n] = others
        K[:n, k] = others
        P = self.inverse if n == self.size == len(K) and shift == self.shift else None
        self.size, self.shift, self.age = n, shift, self.age + 1
        self.inverse = self.L = self._column = None
        if P is None:
            return float(others[k]), 0.0
        updated = torch.empty_like(P) if self._spare is None else self._spare
        others[k] = 0
        with np.errstate(all="ignore"):  # the caller checks for non-finite values
            replace_row(self._array(P), k, others, K[k, k] + shift, out=self._array(updated))
            refined, (square, drifted, whole, *figures) = examine(K, self._array(updated), k, shift)
        collinearity, terms, total = figures
        drift = math.sqrt(drifted / whole) if whole > 0 else math.nan
        grown = sensitivity(collinearity, terms, squared_length(K, refined, terms, total))
        self._spare = updated
        if drift <= DRIFT_LIMIT and drift**2 * grown <= STEP_ERROR and self.age < self._lifetime:  # False for NaN
            self.inverse, self._spare, self._column = updated, P, (k, refined)
        return square, grown

    def factor(self) -> Float[Tensor, "n n"]:
        """L with L Lᵀ = S, remembered until S changes."""
        if self.L is None:
            self.L = woodbury.factor(self.K[: self.size, : self.size], self.shift)
        return self.L

    def settle(self) -> None:
        """Makes sure that an inverse or a factor is held."""
        if self.inverse is None:
            L = self.factor()
            if self.size == len(self.K):
                # Always in one memory format: after a checkpoint sums must be made in the same order.
                self.inverse, self.age = torch.cholesky_inverse(L).contiguous(), 0

    def sensitivity(self, k: int) -> float:
        """By how much errors of products with the window can grow in the step S⁻¹e_k; at least 1."""
        K, c = self.K[: self.size, : self.size], self.column(k)
        squares = K.diagonal()
        known = self.factor().diagonal().square().reciprocal() if self.inverse is None else self.inverse.diagonal()
        figures = ((squares + self.shift) * known).max(), squares @ c.square(), c @ (K @ c)
        collinearity, terms, total = torch.stack(figures).tolist()
        return sensitivity(collinearity, terms, squared_length(K, c, terms, total))

    def too_few_digits(self, dtype: str) -> RuntimeError:
        """What to raise where an answer would be wrong."""
        largest = float(self.K.diagonal().max())
        remedy = max(10.0, 10 * self.size * largest * EPS64 / PRODUCT_TOLERANCE / self.shift)
        wider = "" if dtype == "float64" else ", pass precision='auto'"
        return torch.linalg.LinAlgError(  # type: ignore[attr-defined]
            f"{dtype} has too few digits for this answer: the damping adds {self.shift:.3g} to squared gradients of up "
            f"to {largest:.3g}, which (nearly) repeat one another or the vector; raise the damping {remedy:.1g} times "
            f"or more, or scale the gradients down{wider}"
        )

    def solve(self, b: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """S⁻¹ b."""
        if self.inverse is None or self.L is not None:
            return woodbury.solve(self.factor(), b)
        a = self.inverse @ b
        correction = self.inverse @ (b - self.shift * a - self.K @ a)
        diagonal = self.K.diagonal() + self.shift
        drift = (diagonal @ correction.square()).max() / (diagonal @ a.square()).min()
        if not float(drift) <= SOLVE_DRIFT**2:
            self.inverse = None  # beyond one refinement; the next `settle` recomputes it
            return woodbury.solve(self.factor(), b)
        return a + correction

    def column(self, k: int, factor: float = 1.0) -> Float[Tensor, " n"]:
        """S⁻¹ e_k, multiplied by a factor."""
        if self._column is not None and self._column[0] == k:
            known = self._column[1] * factor
            return torch.from_numpy(known) if self._in_numpy else known
        unit = torch.zeros(self.size, dtype=torch.float64, device=self.K.device)
        unit[k] = factor
        return self.solve(unit)

    def _array(self, tensor: Tensor) -> Any:
        """What updates are computed with: the tensor, or its memory as an array."""
        return tensor.numpy() if self._in_numpy else tensor


def replace_row(P: Array, k: int, others: Array, corner: Array, out: Array) -> None:
    """Writes S⁻¹ [m, m] after row and column k of S were replaced to `out`: a symmetric rank-2 change of P, O(m²).

    Row k is taken out of P (P − q qᵀ/π, q = P e_k, π = q_k) and put back with its new entries (+ u uᵀ/σ): one product
    of an m x 2 by a 2 x m matrix. `others` is row k of the new S, with a zero in the place of S_kk, the `corner`.
    """
    q, v = P[k], P @ others
    u = v - q * (v[k] / q[k])  # the inverse without row k, times the others; zero at k
    u[k] = -1
    sigma = corner - others @ u
    if isinstance(P, Tensor):
        torch.addmm(P, torch.stack((u, q), dim=1), torch.stack((u / sigma, q / -q[k])), out=out)
    else:
        left, right = np.concatenate((u, q)), np.concatenate((u / sigma, q / -q[k]))
        np.matmul(left.reshape(2, -1).T, right.reshape(2, -1), out=out)
        out += P


def squared_length(K: Array, c: Array, terms: float, total: float) -> float:
    """‖Gᵀc‖²: the total c·Kc, or where that is nothing but rounding, max_i (g_i·Gᵀc)²/‖g_i‖², which is at most it."""
    if total > CANCELLED * terms or not terms > 0:
        return total
    return float(((K @ c) ** 2 / K.diagonal().clip(min=sys.float_info.min)).max())


def examine(K: Array, P: Array, k: int, shift: float) -> tuple[Array, list[float]]:
    """How good P is as the inverse of S = shift · I + K, judged by its column k; one host sync.

    Returns S⁻¹e_k, refined by its residual, and figures: K_kk; Σ S_ii c_i² of the correction c that this was, and of
    c = P e_k itself; and the arguments of `precision.sensitivity`: max S_ii P_ii, Σ K_ii c_i² and c·Kc.
    """
    c, squares = P[k], K.diagonal()
    Kc, weights = K @ c, squares + shift
    residual = Kc + c * shift
    residual[k] -= 1
    correction = P @ residual
    terms = c * c
    collinearity, drifted = (weights * P.diagonal()).max(), weights @ (correction * correction)
    figures = (K[k, k], drifted, weights @ terms, collinearity, squares @ terms, c @ Kc)
    found = torch.stack(figures).tolist() if isinstance(figures[0], Tensor) else [float(figure) for figure in figures]
    return c - correction, found

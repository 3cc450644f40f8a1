"""The inverse of the m x m dual matrix, kept up to date while rows of the window are replaced."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mfac import replacement, woodbury
from mfac.precision import sensitivity

# One refinement squares the relative error, and a step multiplies what is left by its sensitivity. A product with any
# vector subtracts nearly all of it again, and needs what a Cholesky gives. Beyond these the inverse is made anew.
DRIFT_LIMIT = 1e-6
STEP_ERROR = 1e-8
SOLVE_DRIFT = 1e-8
LEAST_REFRESH = 64
SMALL = 96  # up to this m updates are made in numpy, whose products of such a matrix use one thread


@dataclass
class _Staged:
    """What `rollback` needs, and the answer that `stage` had to compute anyway; in numpy where updates are."""

    k: int
    size: int
    shift: float
    old: Any
    refined: Any = None


class SlidingInverse:
    """S⁻¹ for S = shift · I + K, all in float64, where K is the Gram matrix of the rows that a window holds.

    Replacing a row in a full window is a rank-2 update of S⁻¹, O(m²). The inverse is made anew by a Cholesky after
    every max(m, 64) replacements (O(m²) each, spread out), and at once when an update shows drift; every answer is
    refined by its residual. While the window fills, or when the shift changes, there is a Cholesky factor instead.

    Args:
        capacity: m.
        device: where the algebra is done.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.K = torch.zeros(capacity, capacity, dtype=torch.float64, device=device)
        self._in_numpy = capacity <= SMALL and device.type == "cpu"
        self._lifetime = max(capacity, LEAST_REFRESH)
        self.size = 0
        self.shift = 1.0
        self.age = 0
        self._P: Tensor | None = None
        self._spare: Tensor | None = None
        self._L: Tensor | None = None
        self._column: tuple[int, Any] | None = None
        self._staged: _Staged | None = None

    @property
    def inverse(self) -> Float[Tensor, "m m"] | None:
        """S⁻¹ where it is held; None where only a factor is, or nothing yet."""
        return self._P

    @property
    def has_factor(self) -> bool:
        """Whether a factor is remembered, which then solves, to other last digits than the inverse."""
        return self._L is not None

    def restore(self, K: Tensor, size: int, shift: float, inverse: Tensor | None, age: int, has_factor: bool) -> None:
        """Takes over a saved state."""
        self.K.copy_(K)
        self.size, self.shift, self.age = size, shift, age
        self._P = None if inverse is None else inverse.to(self.K.device, torch.float64, copy=True).contiguous()
        self._L = self._column = None
        if has_factor:
            self.factor()

    def reset(self, shift: float | None = None) -> None:
        """Forgets what was derived from K, after K or the shift has changed."""
        self.shift = self.shift if shift is None else shift
        self._P = self._L = self._column = None

    def stage(self, k: int, column: Float[Tensor, " n"], shift: float) -> tuple[float, float, float]:
        """Puts `column` (products of the new row k with all n rows) into K, until `commit` or `rollback`.

        `column` is used up.

        Returns:
            What tells whether to commit: the new row's squared norm, the drift of the updated inverse, and the
            sensitivity of S⁻¹e_k (both zero where no inverse is held). It costs one host sync.
        """
        K, products = self._array(self.K), self._array(column)
        n = len(products)
        old = K[k, :n].copy() if self._in_numpy else K[k, :n].clone()
        staged = self._staged = _Staged(k, self.size, self.shift, old)
        steady = n == self.size == len(K) and shift == self.shift
        K[k, :n] = products
        K[:n, k] = products
        self.size, self.shift = n, shift
        if self._P is None or not steady:
            return float(products[k]), 0.0, 0.0
        products[k] = 0
        return self._update(staged, K, products)

    def commit(self, drift: float, sensitivity: float) -> None:
        """Keeps what was staged; with the updated inverse, unless that has drifted or is due to be made anew."""
        assert self._staged is not None
        staged, self._staged = self._staged, None
        self._L = self._column = None
        self.age += 1
        trusted = drift <= DRIFT_LIMIT and drift**2 * sensitivity <= STEP_ERROR  # False for NaN
        if staged.refined is not None and trusted and self.age < self._lifetime:
            self._P, self._spare = self._spare, self._P
            self._column = (staged.k, staged.refined)
        else:
            self._P = None

    def rollback(self) -> None:
        """K as it was before `stage`."""
        assert self._staged is not None
        staged, self._staged = self._staged, None
        n, K = len(staged.old), self._array(self.K)
        K[staged.k, :n] = staged.old
        K[:n, staged.k] = staged.old
        self.size, self.shift = staged.size, staged.shift

    def factor(self) -> Float[Tensor, "n n"]:
        """L with L Lᵀ = S, remembered until S changes."""
        if self._L is None:
            self._L = woodbury.factor(self.K[: self.size, : self.size], self.shift)
        return self._L

    def settle(self) -> None:
        """Makes sure that there is something to solve with."""
        if self._P is None and self.size == len(self.K):
            # One memory format at any time: after a checkpoint sums must be made in the same order.
            self._P, self.age = torch.cholesky_inverse(self.factor()).contiguous(), 0
        elif self._P is None:
            self.factor()

    def sensitivity(self, k: int) -> float:
        """By how much errors of products with the window can grow in the step S⁻¹e_k; at least 1."""
        K, c = self.K[: self.size, : self.size], self.column(k)
        squares = K.diagonal()
        known = self.factor().diagonal().square().reciprocal() if self._P is None else self._P.diagonal()
        figures = ((squares + self.shift) * known).max(), squares @ c.square(), c @ (K @ c)
        return sensitivity(*torch.stack(figures).tolist())

    def solve(self, b: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """S⁻¹ b."""
        if self._P is None or self._L is not None:
            return woodbury.solve(self.factor(), b)
        a = self._P @ b
        correction = self._P @ (b - self.shift * a - self.K @ a)
        diagonal = self.K.diagonal() + self.shift
        drift = (diagonal @ correction.square()).max() / (diagonal @ a.square()).min()
        if not float(drift) <= SOLVE_DRIFT**2:
            self._P = None  # what one refinement cannot mend; the next `settle` makes it anew
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

    def _update(self, staged: _Staged, K: Any, others: Any) -> tuple[float, float, float]:
        """The updated inverse, in the spare memory, and S⁻¹e_k from it; gives what `stage` does."""
        assert self._P is not None
        if self._spare is None:
            self._spare = torch.empty_like(self._P)
        P, updated = self._array(self._P), self._array(self._spare)
        with np.errstate(all="ignore"):  # what is not finite is noticed by who asked
            replacement.replace(P, staged.k, others, K[staged.k, staged.k] + self.shift, out=updated)
            refined, figures = replacement.examine(K, updated, staged.k, self.shift)
        square, drifted, whole, collinearity, terms, total = figures
        staged.refined = refined
        drift = math.sqrt(drifted / whole) if whole > 0 else math.nan
        return square, drift, sensitivity(collinearity, terms, total)

    def _array(self, tensor: Tensor) -> Any:
        """What updates are computed with: the tensor, or its memory as numpy sees it."""
        return tensor.numpy() if self._in_numpy else tensor

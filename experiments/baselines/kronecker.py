"""Pruning by K-FAC: the Fisher matrix of a layer is S ⊗ A (Martens and Grosse, 2015)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from experiments.baselines.kfac import damped_factors
from experiments.baselines.layer_moments import LayerMethod, Moments
from mfac.gradients.losses import LossFn
from mfac.layout import ParameterLayout
from mfac.pruning.options import PruningOptions
from mfac.pruning.step import Step
from mfac.woodbury import scores, single_sums


class Kronecker(LayerMethod):
    """`balance`: see `damped_factors`."""

    name, backward = "kfac", True

    def __init__(self, loss_fn: LossFn, options: PruningOptions, balance: bool = True):
        super().__init__(loss_fn, options)
        self.balance = balance

    def curvature(self, step: Step, measured: Mapping[str, Moments]) -> "KroneckerCurvature":
        return KroneckerCurvature(measured, float(self.options.damping), step.layout, self.balance)


class KroneckerCurvature:
    """S is of the gradients at the outputs, A of the inputs; the damping is split between them.

    Scores use the inverse of the whole layer, as if removed weights could still move; the joint update solves for the
    kept weights alone, by conjugate gradients.
    """

    def __init__(self, moments: Mapping[str, Moments], damping: float, layout: ParameterLayout, balance: bool = True):
        self.damping = damping
        self._layout = layout
        self._factors = {name: _kronecker_factors(m, damping, balance) for name, m in moments.items()}
        self._inverses = {
            name: (torch.cholesky_inverse(torch.linalg.cholesky(S)), torch.cholesky_inverse(torch.linalg.cholesky(A)))
            for name, (S, A) in self._factors.items()
        }

    def scores(self, theta: Tensor) -> Tensor:
        return scores(theta, self._inverse_diagonal())

    def remove(self, theta: Tensor, removed: Tensor, update: str) -> tuple[Tensor, float]:
        delta = torch.where(removed, -theta, 0.0)
        if update == "obs":
            x = single_sums(theta, removed, self._inverse_diagonal())
            delta = torch.where(removed, -theta, -self._apply(self._inverses, x))
        elif update == "joint":
            delta = delta + self._solve_kept(-self._apply(self._factors, delta), ~removed)
        return delta, 0.5 * float(delta @ self._apply(self._factors, delta))

    def _inverse_diagonal(self) -> Tensor:
        names = self._layout.names
        return self._row(
            {n: torch.outer(S.diagonal(), A.diagonal()) for n, (S, A) in self._inverses.items() if n in names}
        )

    def _apply(self, factors: Mapping[str, tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        """(S ⊗ A) x over the kept weights."""
        values = self._layout.unflatten(x)
        return self._row({name: S @ values[name].flatten(1) @ A for name, (S, A) in factors.items()})

    def _row(self, matrices: Mapping[str, Tensor]) -> Tensor:
        row = torch.empty(self._layout.dim, dtype=torch.float64, device=self._layout.device)
        shapes = zip(self._layout.names, self._layout.tensors, strict=True)
        self._layout.flatten([matrices[name].view(tensor.shape) for name, tensor in shapes], row)
        return row

    def _solve_kept(self, b: Tensor, kept: Tensor, steps: int = 200, tolerance: float = 1e-6) -> Tensor:
        """F_RR⁻¹ b by conjugate gradients, preconditioned by the inverse of the whole."""
        x = torch.zeros_like(b)
        residual = torch.where(kept, b, 0.0)
        goal = tolerance * residual.norm()
        direction, before = x, 1.0
        for _ in range(steps):
            if residual.norm() <= goal:
                break
            z = torch.where(kept, self._apply(self._inverses, residual), 0.0)
            now = float(residual @ z)
            direction = z + (now / before) * direction
            product = torch.where(kept, self._apply(self._factors, direction), 0.0)
            length = now / float(direction @ product)
            x = x + length * direction
            residual = residual - length * product
            before = now
        return x


def _kronecker_factors(moments: Moments, damping: float, balance: bool) -> tuple[Tensor, Tensor]:
    if len(moments.inputs) > 1:
        raise ValueError(
            f"method 'kfac' knows no grouped convolutions, and {moments.layer} is one; leave it out by ignore"
        )
    return damped_factors(moments.outputs / moments.positions, moments.inputs[0] / moments.samples, damping, balance)

"""Curvatures that other methods go by: weights alone, a layer's inputs (L-OBS), Kronecker factors (K-FAC)."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mfac.layout import ParameterLayout
from mfac.pruning.layer_statistics import Moments
from mfac.pruning.removal import primal_removal, scores, single_sums

BATCH_NUMBERS = 1 << 24  # in the k x k matrices that are factored at once


class WeightCurvature:
    """Scores θ_i² c_i, and no weight moves: magnitude (c = 1), Wanda (c = the mean square of the input)."""

    damping = None

    def __init__(self, factors: Float[Tensor, " d"] | None = None):
        self.factors = factors

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """θ² c."""
        return theta.square() if self.factors is None else theta.square() * self.factors

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], None]:
        """Sets them to zero, whatever the update; nothing is predicted."""
        return torch.where(removed, -theta, 0.0), None


class LayerInputCurvature:
    """L-OBS: each row of a layer's weight has the Hessian A + λI of the squared error of the layer's output.

    A is the second moment of the inputs. What is minimised is the change of each layer's own output, so nothing is
    predicted about the loss.
    """

    def __init__(
        self, moments: Mapping[str, Moments], damping: float, layout: ParameterLayout, masks: Mapping[str, Tensor]
    ):
        self.damping = damping
        self._moments, self._layout, self._masks = moments, layout, masks

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """θ_i² / (2 [H⁻¹]_ii)."""
        return scores(theta, self._inverse_diagonal())

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], None]:
        """The update of every row by itself."""
        if update == "none":
            return torch.where(removed, -theta, 0.0), None
        if update == "obs":
            x = single_sums(theta, removed, self._inverse_diagonal())
            moved = self._each_row(lambda H, rows: -torch.linalg.solve(H, rows[0]), x)
        else:
            moved = self._each_row(lambda H, rows: primal_removal(H, rows[0], rows[1] > 0)[0], theta, removed.double())
        return torch.where(removed, -theta, moved), None

    def _inverse_diagonal(self) -> Float[Tensor, " d"]:
        def diagonal(H: Tensor, rows: list[Tensor]) -> Tensor:
            return torch.cholesky_inverse(torch.linalg.cholesky(H)).diagonal(dim1=-2, dim2=-1)

        return self._each_row(diagonal)

    def _each_row(self, function, *vectors: Float[Tensor, " d"]) -> Float[Tensor, " d"]:  # type: ignore[no-untyped-def]
        """function(H [n, k, k], [values [n, k], ...]) for rows of every layer, put together again as a vector."""
        values = [self._layout.unflatten(vector) for vector in vectors]
        out = {}
        for name in self._layout.names:
            shape = self._masks[name].shape
            parts = [
                function(H, [value[name].flatten(1)[rows] for value in values]) for rows, H in self._row_hessians(name)
            ]
            out[name] = torch.cat(parts).view(shape)
        row = torch.empty(self._layout.dim, dtype=torch.float64, device=self._layout.device)
        self._layout.flatten([out[name] for name in self._layout.names], row)
        return row

    def _row_hessians(self, name: str) -> Iterator[tuple[slice, Float[Tensor, "n k k"]]]:
        """H over the weights that each row still has; ones on the diagonal for those that are gone."""
        moments, kept = self._moments[name], self._masks[name].flatten(1)
        A = moments.inputs / moments.positions
        A.diagonal(dim1=1, dim2=2).add_(self.damping)
        out_per_group = len(kept) // len(A)
        step = max(1, BATCH_NUMBERS // A.shape[1] ** 2)
        for group, H in enumerate(A):
            end = (group + 1) * out_per_group
            for start in range(group * out_per_group, end, step):
                rows = slice(start, min(start + step, end))
                both = kept[rows, :, None] & kept[rows, None, :]
                masked = torch.where(both, H, 0.0)
                masked.diagonal(dim1=1, dim2=2).add_((~kept[rows]).double())
                yield rows, masked


class KroneckerCurvature:
    """K-FAC: F of a layer is S ⊗ A, S of the outputs' gradients and A of the inputs; the damping is split between them.

    Scores go by the whole layer's inverse, as if weights that are gone could still move; the joint update does not: it
    solves for the kept weights alone, by conjugate gradients.
    """

    def __init__(self, moments: Mapping[str, Moments], damping: float, layout: ParameterLayout):
        self.damping = damping
        self._layout = layout
        self._factors = {name: _kronecker_factors(m, damping) for name, m in moments.items()}
        self._inverses = {
            name: (torch.cholesky_inverse(torch.linalg.cholesky(S)), torch.cholesky_inverse(torch.linalg.cholesky(A)))
            for name, (S, A) in self._factors.items()
        }

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """θ_oj² / (2 [S⁻¹]_oo [A⁻¹]_jj)."""
        return scores(theta, self._inverse_diagonal())

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        """The change, and ½ δᵀ(S ⊗ A)δ."""
        delta = torch.where(removed, -theta, 0.0)
        if update == "obs":
            x = single_sums(theta, removed, self._inverse_diagonal())
            delta = torch.where(removed, -theta, -self._apply(self._inverses, x))
        elif update == "joint":
            delta = delta + self._solve_kept(-self._apply(self._factors, delta), ~removed)
        return delta, 0.5 * float(delta @ self._apply(self._factors, delta))

    def _inverse_diagonal(self) -> Float[Tensor, " d"]:
        names = self._layout.names
        return self._row(
            {n: torch.outer(S.diagonal(), A.diagonal()) for n, (S, A) in self._inverses.items() if n in names}
        )

    def _apply(self, factors: Mapping[str, tuple[Tensor, Tensor]], x: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """(S ⊗ A) x over the kept weights."""
        values = self._layout.unflatten(x)
        return self._row({name: S @ values[name].flatten(1) @ A for name, (S, A) in factors.items()})

    def _row(self, matrices: Mapping[str, Tensor]) -> Float[Tensor, " d"]:
        row = torch.empty(self._layout.dim, dtype=torch.float64, device=self._layout.device)
        shapes = zip(self._layout.names, self._layout.tensors, strict=True)
        self._layout.flatten([matrices[name].view(tensor.shape) for name, tensor in shapes], row)
        return row

    def _solve_kept(self, b: Tensor, kept: Tensor, steps: int = 200, tolerance: float = 1e-6) -> Float[Tensor, " d"]:
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


def _kronecker_factors(moments: Moments, damping: float) -> tuple[Float[Tensor, "out out"], Float[Tensor, "k k"]]:
    """S + √λ/π I and A + π√λ I, π² the ratio of their mean diagonals (Martens & Grosse, 2015).

    Raises:
        ValueError: the layer has groups.
    """
    if len(moments.inputs) > 1:
        raise ValueError(
            f"method 'kfac' knows no grouped convolutions, and {moments.layer} is one; leave it out by ignore"
        )
    A = moments.inputs[0] / moments.samples
    S = moments.outputs / moments.positions
    # A layer that no gradient reaches has S = 0; the smallest positive number keeps π finite.
    tiny = torch.finfo(torch.float64).tiny
    pi = ((A.diagonal().mean() + tiny) / (S.diagonal().mean() + tiny)).sqrt().clamp(1e-6, 1e6)
    A.diagonal().add_(pi * damping**0.5)
    S.diagonal().add_(damping**0.5 / pi)
    return S, A

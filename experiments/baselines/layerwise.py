"""Pruning by the inputs of each layer alone: Wanda (Sun et al., 2023) and layer-wise OBS (Dong et al., 2017)."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from experiments.baselines.layer_moments import LayerMethod, Moments
from mfac.gradients.losses import LossFn
from mfac.layout import ParameterLayout
from mfac.pruning.options import PruningOptions
from mfac.pruning.step import Magnitude, Step
from mfac.woodbury import primal_removal, scores, single_sums

BATCH_NUMBERS = 1 << 24  # in the k x k matrices that are factored at once


class Wanda(LayerMethod):
    """Scores θ_ij² · mean(a_j²), a_j the input that the weight multiplies; the remaining weights do not move.

    With `by_row`, as for language models, weights compete with those of the same output: the score is the rank there.
    """

    name = "wanda"

    def __init__(self, loss_fn: LossFn, options: PruningOptions, by_row: bool = False):
        super().__init__(loss_fn, options)
        self.by_row = by_row

    def curvature(self, step: Step, measured: Mapping[str, Moments]) -> "InputNorms":
        factors = {}
        for name, mask in step.weights.masks.items():
            squares = measured[name].inputs.diagonal(dim1=1, dim2=2) / measured[name].positions
            factors[name] = squares.repeat_interleave(len(mask) // len(squares), 0).view(mask.shape)
            if self.by_row:
                squares = step.weights.targets[name].detach().double().square()
                ranks = (squares * factors[name]).flatten(1).argsort(1).argsort(1).view(mask.shape) + 1
                factors[name] = ranks / mask[0].numel() / squares.clamp_min(1e-300)
        return InputNorms(step.weights.row_of(step.layout, factors))


class InputNorms(Magnitude):
    """Scores θ_i² c_i; the remaining weights do not move."""

    def __init__(self, factors: Tensor):
        self.factors = factors

    def scores(self, theta: Tensor) -> Tensor:
        return theta.square() * self.factors


class LayerwiseOBS(LayerMethod):
    """L-OBS: each row of a layer's weight has the Hessian A + λI of the squared error of the layer's output."""

    name = "lobs"

    def curvature(self, step: Step, measured: Mapping[str, Moments]) -> "LayerInputCurvature":
        return LayerInputCurvature(measured, float(self.options.damping), step.layout, step.weights.masks)


class LayerInputCurvature:
    """A is the second moment of the inputs; nothing is predicted about the loss."""

    def __init__(
        self, moments: Mapping[str, Moments], damping: float, layout: ParameterLayout, masks: Mapping[str, Tensor]
    ):
        self.damping = damping
        self._moments, self._layout, self._masks = moments, layout, masks

    def scores(self, theta: Tensor) -> Tensor:
        return scores(theta, self._inverse_diagonal())

    def remove(self, theta: Tensor, removed: Tensor, update: str) -> tuple[Tensor, None]:
        if update == "none":
            return torch.where(removed, -theta, 0.0), None
        if update == "obs":
            x = single_sums(theta, removed, self._inverse_diagonal())
            moved = self._each_row(lambda H, rows: -torch.linalg.solve(H, rows[0]), x)
        else:
            moved = self._each_row(lambda H, rows: primal_removal(H, rows[0], rows[1] > 0)[0], theta, removed.double())
        return torch.where(removed, -theta, moved), None

    def _inverse_diagonal(self) -> Tensor:
        def diagonal(H: Tensor, rows: list[Tensor]) -> Tensor:
            return torch.cholesky_inverse(torch.linalg.cholesky(H)).diagonal(dim1=-2, dim2=-1)

        return self._each_row(diagonal)

    def _each_row(self, function, *vectors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """function(H [n, k, k], [values [n, k], ...]) for the rows of every layer, as one vector."""
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

    def _row_hessians(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """H over the weights that each row still has; ones on the diagonal for removed ones."""
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

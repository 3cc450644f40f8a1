"""WoodFisher (Singh and Alistarh, 2020): the dense inverse of every block, by a recursion over the gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mfac.gradients import collect_gradients
from mfac.gradients.losses import LossFn
from mfac.pages import block_runs
from mfac.pruning.options import PruningOptions
from mfac.pruning.step import Step
from mfac.reference import woodbury_recursion
from mfac.woodbury import factor, scores, single_sums, solve

BLOCK_PIECE = 1 << 20


class WoodFisher:
    def __init__(self, loss_fn: LossFn, options: PruningOptions):
        if options.block_size is None or options.rows_dir is not None:
            raise ValueError("method 'woodfisher' keeps dense blocks and rows in memory: give block_size, no rows_dir")
        self.loss_fn, self.options, self.block_size = loss_fn, options, options.block_size

    def measure(self, step: Step) -> Tensor:
        options = self.options
        return collect_gradients(
            step.weights.model, self.loss_fn, step.stream, options.num_grads, params=list(step.layout.names),
            masks=step.weights.masks, per_sample=options.per_sample, fisher=options.fisher,
            seed=(options.seed or 0) + step.number, progress=options.progress,
        )  # fmt: skip

    def curvature(self, step: Step, measured: Tensor) -> "RecursionCurvature":
        return RecursionCurvature(measured, float(self.options.damping), self.block_size, step.layout.sizes)


class RecursionCurvature:
    """Block inverses [B, B] by m rank-one steps each: O(B d m) time and O(B d) memory."""

    def __init__(self, grads: Tensor, damping: float, block_size: int, sizes: Sequence[int]):
        self.damping = damping
        self._runs = block_runs(grads.shape[1], block_size, sizes)
        self._inverses = []
        for run in self._runs:
            step = run.length * max(1, BLOCK_PIECE // run.length**2)
            pieces = [
                woodbury_recursion(piece.split_columns(grads[:, piece.columns]).double(), damping)
                for piece in run.pieces(step)
            ]
            self._inverses.append(torch.cat(pieces))

    def scores(self, theta: Tensor) -> Tensor:
        return scores(theta, self._diagonal())

    def remove(self, theta: Tensor, removed: Tensor, update: str) -> tuple[Tensor, float]:
        """The change, and ½ δᵀFδ: exact for "joint", otherwise the sum of single scores, as in WoodFisher."""
        single = float(self.scores(theta)[removed].sum())
        if update == "none":
            return torch.where(removed, -theta, 0.0), single
        if update == "obs":
            x = single_sums(theta, removed, self._diagonal())
            moved = [inverse @ part[..., None] for inverse, part in zip(self._inverses, self._split(x), strict=True)]
            return torch.where(removed, -theta, -torch.cat([m.flatten() for m in moved])), single
        results = [
            inverse_removal(inverse, t, r)
            for inverse, t, r in zip(self._inverses, self._split(theta), self._split(removed), strict=True)
        ]
        return torch.cat([delta.flatten() for delta, _ in results]), float(sum(cost.sum() for _, cost in results))

    def _diagonal(self) -> Tensor:
        return torch.cat([inverse.diagonal(dim1=1, dim2=2).flatten() for inverse in self._inverses])

    def _split(self, x: Tensor) -> list[Tensor]:
        return [x[run.start : run.stop].view(run.count, run.length) for run in self._runs]


def inverse_removal(inverse: Tensor, theta: Tensor, removed: Tensor) -> tuple[Tensor, Tensor]:
    """The joint removal from F⁻¹: δ = −F⁻¹_:Q ([F⁻¹]_QQ)⁻¹ θ_Q, and ½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q."""
    gone = torch.where(removed, theta, 0.0)
    inner = torch.where(removed[..., :, None] & removed[..., None, :], inverse, 0.0)
    inner.diagonal(dim1=-2, dim2=-1).add_((~removed).to(inverse.dtype))
    x = torch.where(removed, solve(factor(inner, 0.0, overwrite=True), gone), 0.0)
    delta = -torch.einsum("...ij,...j->...i", inverse, x)
    return torch.where(removed, -theta, delta), 0.5 * (gone * x).sum(-1)


def rank_one_steps(rows: Tensor, damping: float, num_grads: int) -> Tensor:
    """Inverses [blocks, b, b] of λI + (1/num_grads) Σ g gᵀ over `rows` [blocks, m, b], in place, for timing.

    `mfac.reference.woodbury_recursion` is the same, but allocates a new inverse in every step.
    """
    blocks, _, b = rows.shape
    inverse = torch.eye(b, dtype=rows.dtype, device=rows.device).div_(damping).repeat(blocks, 1, 1)
    for g in rows.transpose(0, 1).unsqueeze(-1):  # [blocks, b, 1]
        v = inverse @ g
        v /= (num_grads + g.transpose(1, 2) @ v).sqrt()
        inverse.baddbmm_(v, v.transpose(1, 2), alpha=-1)
    return inverse

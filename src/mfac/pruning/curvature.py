"""The damped Fisher matrix as pruning needs it: the cost of removing weights, and the update of the kept ones."""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.pages import WIDE_PIECE, Reduce
from mfac.pruning.greedy import greedy_costs
from mfac.static import BlockOptions, build_blocks, elements
from mfac.woodbury import scores, single_sums


class Curvature(Protocol):
    """Costs and updates of a method. All vectors are over the kept weights of the targets, in float64.

    `damping` is λ, if there is one; `scores` are the costs of removing each weight; `remove` gives the change of theta
    and, if the method predicts it, the loss that it adds.
    """

    @property
    def damping(self) -> float | None: ...

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]: ...

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float | None]: ...


class FisherCurvature:
    """Blocks of F = λI + GᵀG/m, or all of it, from rows in memory, on disk, or summed into blocks.

    `sizes` are the kept weights of each tensor; no block straddles two of them. `reduce` sums over the ranks that share
    the full matrix; other blocks lie on one rank each, with their costs.
    """

    def __init__(
        self, grads: Tensor | GradientFile | FisherBlocks, damping: float, block_size: int | None,
        sizes: Sequence[int], device: torch.device, reduce: Reduce | None = None,
    ):  # fmt: skip
        self.damping = damping
        self.num_grads = int(grads.shape[0])
        options = BlockOptions(block_size, None if block_size is None else sizes, device=device)
        if isinstance(grads, FisherBlocks):
            options = BlockOptions(device=device)
        options.check(grads, damping)
        self.blocks = build_blocks(grads, damping, options, reduce if block_size is None else None)

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        return scores(theta, self._diagonal())

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        """The change by the update "none", "obs" or "joint", and ½ δᵀFδ of it."""
        if update == "joint":
            results = [b.joint_removal(theta[b.run.columns], removed[b.run.columns]) for b in self.blocks]
            return torch.cat([theta[:0], *(delta for delta, _ in results)]), float(sum(cost for _, cost in results))
        delta = torch.where(removed, -theta, 0.0)
        if update == "obs":
            x = single_sums(theta, removed, self._diagonal())
            moved = [blocks.apply(x[blocks.run.columns]) for blocks in self.blocks]
            delta = torch.where(removed, -theta, -torch.cat([x[:0], *moved]))
        return delta, float(sum(blocks.cost(delta[blocks.run.columns]) for blocks in self.blocks))

    def group_costs(self, theta: Float[Tensor, " d"], ids: Int[Tensor, " d"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of each of `count` groups, `ids` being each weight's group."""
        out = torch.zeros(count, dtype=torch.float64, device=theta.device)
        for blocks in self.blocks:
            out += blocks.group_costs(theta[blocks.run.columns], ids[blocks.run.columns], count)
        return out

    def greedy_scores(self, theta: Float[Tensor, " d"], count: int) -> Float[Tensor, " d"]:
        """The cost of each weight when the exact greedy order reaches it; infinite beyond the `count` cheapest."""
        found, cheapest, threshold = torch.empty_like(theta), theta[:0], torch.inf
        for blocks in self.blocks:
            run = blocks.run
            if run.length * min(run.length, self.num_grads) > WIDE_PIECE:
                raise ValueError('order="greedy" works on dense blocks; give a block_size, some hundreds at most')
            weights, costs = (vector[run.columns].unflatten(0, (run.count, run.length)) for vector in (theta, found))
            for some, inverse in blocks.inverses():
                costs[some] = greedy_costs(inverse, weights[some], threshold)
                cheapest = torch.cat((cheapest, costs[some].flatten())).sort().values[:count]
                if len(cheapest) == count:  # later blocks need not go beyond it
                    threshold = float(cheapest[-1])
        return found

    def group_inverses(self, positions: Int[Tensor, "groups size"]) -> Float[Tensor, "groups size size"]:
        """[F⁻¹]_QQ of every group Q; zero between blocks, and where a weight is absent (at position −1)."""
        size = positions.shape[1]
        a, b = torch.triu_indices(size, size, device=positions.device)
        group, pair = ((positions[:, a] >= 0) & (positions[:, b] >= 0)).nonzero(as_tuple=True)
        i, j = a[pair], b[pair]
        inverse = torch.zeros(len(positions), size, size, dtype=torch.float64, device=positions.device)
        values = elements(self.blocks, positions[group, i], positions[group, j])
        inverse[group, i, j] = inverse[group, j, i] = values
        return inverse

    def _diagonal(self) -> Float[Tensor, " d"]:
        parts = [blocks.diagonal() for blocks in self.blocks]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

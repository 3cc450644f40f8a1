"""The curvature of all weights where each rank has it for a share of them."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac.columns import Ranks
from mfac.distributed.shares import ColumnShare
from mfac.pruning.curvature import FisherCurvature, costs_in_groups


class SharedCurvature:
    """Takes and gives vectors over all weights, with the same bits on every rank; works on this rank's share of them.

    Args:
        local: of this rank's share.
        shares: of the weights, by rank.
        ranks: that take part.
    """

    def __init__(self, local: FisherCurvature, shares: Sequence[ColumnShare], ranks: Ranks):
        self.local = local
        self.shares = shares
        self.ranks = ranks
        self._mine = shares[ranks.rank]

    @property
    def damping(self) -> float:
        """λ."""
        return self.local.damping

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """θ_i² / (2 [F⁻¹]_ii)."""
        with self.ranks.together("scoring"):  # diagonals are local, of the full matrix too
            scores = self.local.scores(theta[self._mine.columns])
        return self._gather(scores)

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        """The change by the update "none", "obs" or "joint", each rank's by itself, and ½ δᵀFδ of all."""
        delta, cost = self.local.remove(theta[self._mine.columns], removed[self._mine.columns], update)
        return self._gather(delta), cost

    def group_costs(self, theta: Float[Tensor, " d"], ids: Int[Tensor, " d"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of each of `count` groups; those of the full matrix must be on one rank each."""
        with self.local.block_ranks.together("the costs of slices"):
            costs = self.local.group_costs(theta[self._mine.columns], ids[self._mine.columns], count)
        return self.ranks.sum_(costs)

    def greedy_scores(self, theta: Float[Tensor, " d"], count: int | None) -> Float[Tensor, " d"]:
        """What each weight costs when the exact greedy order comes to it; infinite beyond the `count` cheapest."""
        with self.ranks.together("the greedy order"):
            scores = self.local.greedy_scores(theta[self._mine.columns], count)
        return self._gather(scores)

    def order_in_groups(
        self, theta: Float[Tensor, " d"], positions: Int[Tensor, "groups size"]
    ) -> Float[Tensor, "groups size"]:
        """What each weight of a small group costs when the exact greedy order inside the group comes to it.

        A group may have weights on several ranks, but no two of them in one block; the full matrix is divided so that
        none does.
        """
        mine = (positions >= self._mine.start) & (positions < self._mine.stop)
        with self.local.block_ranks.together("the order inside groups"):
            inverse = self.local.group_inverses(torch.where(mine, positions - self._mine.start, -1))
        return costs_in_groups(self.ranks.sum_(inverse), theta, positions)

    def _gather(self, piece: Float[Tensor, " n"]) -> Float[Tensor, " d"]:
        return self.ranks.gather(piece.double(), [len(share) for share in self.shares])

"""The curvature of all weights when each rank has it for a share of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac.distributed.shares import ColumnShare
from mfac.inverse_fisher import Ranks


class SharedCurvature:
    """Takes and gives vectors over all weights, with the same bits on every rank; works on this rank's share of them.

    `local` is the `mfac.pruning.curvature.FisherCurvature` of this rank's share, with the same methods. `divided` says
    whether blocks are divided among the ranks; otherwise all share one matrix, which sums over them.
    """

    def __init__(self, local: Any, shares: Sequence[ColumnShare], ranks: Ranks, divided: bool):
        self.local, self.ranks = local, ranks
        self.damping: float = local.damping
        self._lengths = [len(share) for share in shares]
        self._mine = shares[ranks.rank]
        self._divided = divided

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        with self.ranks.together("scoring"):  # diagonals need no other rank, those of the full matrix neither
            scores = self.local.scores(theta[self._mine.columns])
        return self._gather(scores)

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        with self._alone("removing weights"):
            delta, cost = self.local.remove(theta[self._mine.columns], removed[self._mine.columns], update)
        if self._divided:
            cost = float(self.ranks.sum_(torch.tensor(cost, dtype=torch.float64, device=theta.device)))
        return self._gather(delta), cost

    def group_costs(self, theta: Float[Tensor, " d"], ids: Int[Tensor, " d"], count: int) -> Float[Tensor, " count"]:
        with self._alone("the costs of slices"):  # of the full matrix each slice must be on one rank
            costs = self.local.group_costs(theta[self._mine.columns], ids[self._mine.columns], count)
        return self.ranks.sum_(costs)

    def greedy_scores(self, theta: Float[Tensor, " d"], count: int) -> Float[Tensor, " d"]:
        with self.ranks.together("the greedy order"):
            scores = self.local.greedy_scores(theta[self._mine.columns], count)
        return self._gather(scores)

    def group_inverses(self, positions: Int[Tensor, "groups size"]) -> Float[Tensor, "groups size size"]:
        # A group may have weights on several ranks, but no two of them in one block; the full matrix is divided so
        # that none does.
        mine = (positions >= self._mine.start) & (positions < self._mine.stop)
        with self._alone("the order inside groups"):
            inverse = self.local.group_inverses(torch.where(mine, positions - self._mine.start, -1))
        return self.ranks.sum_(inverse)

    def _alone(self, what: str) -> AbstractContextManager[None]:
        """For work on this rank's own blocks, which fails on all ranks or none; the full matrix sums inside."""
        return self.ranks.together(what) if self._divided else nullcontext()

    def _gather(self, piece: Float[Tensor, " n"]) -> Float[Tensor, " d"]:
        return self.ranks.gather(piece.double(), self._lengths)

"""The damped Fisher matrix as pruning needs it: what a weight's removal costs, and how the others move."""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac.blocks import FisherBlocks, Run, block_runs
from mfac.columns import Ranks
from mfac.gradient_file import GradientFile
from mfac.pages import Pages
from mfac.pruning.fisher_parts import WIDE_PIECE, LargeBlocks, SmallBlocks, SummedBlocks
from mfac.pruning.greedy import CheapestSoFar, greedy_costs
from mfac.pruning.removal import scores, single_sums
from mfac.static import StaticInverseFisher

FisherPart = SmallBlocks | LargeBlocks | SummedBlocks


class Curvature(Protocol):
    """What every method gives: scores of the weights that are there, and the change that removes some of them.

    All vectors are over the kept weights of the targets, in float64.
    """

    @property
    def damping(self) -> float | None:
        """λ; None where the method has none."""

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """What the removal of each weight costs; only the order matters where nothing is predicted."""

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float | None]:
        """What is added to theta, −θ on the removed weights, and what that adds to the loss by the quadratic model."""


class FisherCurvature:
    """Blocks of F = λI + GᵀG/m, or all of it, from rows in memory, on disk, or summed into blocks.

    With several ranks, rows and vectors are this rank's share of the columns, and costs are those of all ranks.

    Args:
        grads: the rows, or their sums.
        damping: λ.
        block_size: of the blocks; None: the full matrix.
        sizes: kept weights of each tensor; no block straddles two of them.
        device: where to compute.
        ranks: that have the other columns.
    """

    def __init__(
        self,
        grads: Tensor | GradientFile | FisherBlocks,
        damping: float,
        block_size: int | None,
        sizes: Sequence[int],
        device: torch.device,
        ranks: Ranks | None = None,
    ):
        self.grads = grads
        ranks = Ranks() if ranks is None else ranks
        # Among whom blocks are divided: nobody, where all have a part of one matrix.
        self.block_ranks = Ranks() if block_size is None and not isinstance(grads, FisherBlocks) else ranks
        if isinstance(grads, FisherBlocks):
            self.inverse = StaticInverseFisher(grads, damping, device=device, process_group=ranks.group)
            self.parts: list[FisherPart] = [
                SummedBlocks(run, total.to(device) / grads.num_grads, damping)
                for run, total in zip(grads.runs, grads.sums, strict=True)
            ]
            return
        split = None if block_size is None else sizes
        self.inverse = StaticInverseFisher(
            grads, damping, block_size=block_size, sizes=split, device=device, process_group=ranks.group
        )
        pages = Pages(grads, device)
        runs = block_runs(self.inverse.shape[0], block_size, split)
        if block_size is None and ranks.size > 1:
            self.parts = [LargeBlocks(runs[0], pages, damping, ranks)]
        else:
            self.parts = [_part(run, pages, damping) for run in runs]

    @property
    def damping(self) -> float:
        """λ."""
        return self.inverse.damping

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """θ_i² / (2 [F⁻¹]_ii)."""
        return scores(theta, self.inverse.diagonal().double())

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        """The change by the update "none", "obs" or "joint", and ½ δᵀFδ of it."""
        if update == "joint":
            with self.block_ranks.together("removing weights"):
                results = [p.joint_removal(theta[_slot(p.run)], removed[_slot(p.run)]) for p in self.parts]
                delta = torch.cat([theta[:0], *(delta for delta, _ in results)])
            return delta, self._total([cost for _, cost in results])
        delta = torch.where(removed, -theta, 0.0)
        if update == "obs":
            x = single_sums(theta, removed, self.inverse.diagonal().double())
            delta = torch.where(removed, -theta, -(self.inverse @ x))
        return delta, self.cost(delta)

    def group_costs(self, theta: Float[Tensor, " d"], ids: Int[Tensor, " d"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of each of `count` groups, `ids` being the group of every weight; needs the rows."""
        out = torch.zeros(count, dtype=torch.float64, device=theta.device)
        for part in self.parts:
            assert not isinstance(part, SummedBlocks)
            part.add_group_costs(theta[_slot(part.run)], ids[_slot(part.run)], out)
        return out

    def greedy_scores(self, theta: Float[Tensor, " d"], count: int | None) -> Float[Tensor, " d"]:
        """What each weight costs when the exact greedy order comes to it; infinite beyond the `count` cheapest.

        Raises:
            ValueError: blocks too large for their dense inverses.
        """
        cheapest = None if count is None else CheapestSoFar(count)
        found = torch.empty_like(theta)
        for part in self.parts:
            if isinstance(part, LargeBlocks):
                raise ValueError('order="greedy" works on dense blocks; give a block_size, some hundreds at most')
            for piece, inverse in part.inverses():
                threshold = torch.inf if cheapest is None else cheapest.threshold
                costs = greedy_costs(inverse, piece.split(theta[piece.columns]), threshold)
                found[piece.columns] = costs.flatten()
                if cheapest is not None:
                    cheapest.show(costs)
        return found

    def order_in_groups(
        self, theta: Float[Tensor, " d"], positions: Int[Tensor, "groups size"]
    ) -> Float[Tensor, "groups size"]:
        """What each weight of a small group costs when the exact greedy order inside the group comes to it.

        Args:
            theta: the kept weights.
            positions: of each group's weights among them; −1 where there is none, which costs infinitely much.
        """
        return costs_in_groups(self.group_inverses(positions), theta, positions)

    def cost(self, delta: Float[Tensor, " d"]) -> float:
        """½ δᵀFδ of any change."""
        return self._total([part.cost(delta[_slot(part.run)]) for part in self.parts])

    def group_inverses(self, positions: Int[Tensor, "groups size"]) -> Float[Tensor, "groups size size"]:
        """[F⁻¹]_QQ of every group Q; zero between blocks, and where a weight is absent (at position −1)."""
        size = positions.shape[1]
        inverse = torch.zeros(len(positions), size, size, dtype=torch.float64, device=positions.device)
        diagonal = torch.nn.functional.pad(self.inverse.diagonal().double(), (0, 1))
        inverse.diagonal(dim1=1, dim2=2).copy_(diagonal[positions])
        a, b = torch.triu_indices(size, size, 1, device=positions.device)
        for part in self.parts:
            block = torch.where(positions < 0, -1, positions - part.run.start) // max(1, part.run.length)
            inside = (block >= 0) & (block < part.run.count)
            group, pair = ((block[:, a] == block[:, b]) & inside[:, a] & inside[:, b]).nonzero(as_tuple=True)
            i, j = a[pair], b[pair]
            rows, columns = positions[group, i] - part.run.start, positions[group, j] - part.run.start
            inverse[group, i, j] = inverse[group, j, i] = part.elements(rows, columns)
        return inverse

    def _total(self, costs: Sequence[Float[Tensor, ""]]) -> float:
        """The sum over all blocks, whichever rank has them."""
        total = torch.zeros((), dtype=torch.float64, device=self.inverse.device)
        return float(self.block_ranks.sum_(total + sum(costs)))


def costs_in_groups(
    inverse: Float[Tensor, "groups size size"], theta: Float[Tensor, " d"], positions: Int[Tensor, "groups size"]
) -> Float[Tensor, "groups size"]:
    """What each weight of a group costs, from [F⁻¹]_QQ, which is zero where one is absent (at position −1)."""
    absent = positions < 0
    inverse.diagonal(dim1=1, dim2=2)[absent] = 1
    return greedy_costs(inverse, theta[positions.clamp_min(0)], absent=absent)


def _part(run: Run, pages: Pages, damping: float) -> FisherPart:
    whole = run.length * min(run.length, pages.shape[0]) <= WIDE_PIECE
    return SmallBlocks(run, pages, damping) if whole else LargeBlocks(run, pages, damping)


def _slot(run: Run) -> slice:
    return slice(run.start, run.stop)

"""The damped Fisher matrix as pruning needs it: the cost of removing weights, and the update of the kept ones."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.pages import WIDE_PIECE, Reduce
from mfac.pruning.greedy import greedy_costs
from mfac.pruning.row_fisher import RowBlocks
from mfac.static import BlockOptions, Blocks, build_blocks
from mfac.woodbury import scores, single_sums

AnyBlocks = Blocks | RowBlocks
Columns = slice | Int[Tensor, " n"]


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
    """Blocks of the damped F, or all of it, in groups: `groups()` gives them one after the other, some anew each time.

    `columns` of each are the weights of its vectors. With several ranks, the costs are those of this rank's blocks.
    """

    def __init__(self, groups: Callable[[], Iterable[Sequence[AnyBlocks]]], damping: float, num_grads: int):
        self.groups, self.damping, self.num_grads = groups, damping, num_grads

    @classmethod
    def of_rows(
        cls, grads: Tensor | GradientFile | FisherBlocks, damping: float, block_size: int | None,
        sizes: Sequence[int], device: torch.device, reduce: Reduce | None = None,
    ) -> "FisherCurvature":  # fmt: skip
        """F = λI + GᵀG/m from rows in memory, on disk, or summed into blocks.

        `sizes` are the kept weights of each tensor; no block straddles two of them. `reduce` sums over the ranks that
        share the full matrix; other blocks lie on one rank each.
        """
        options = BlockOptions(block_size, None if block_size is None else sizes, device=device)
        if isinstance(grads, FisherBlocks):
            options = BlockOptions(device=device)
        options.check(grads, damping)
        blocks = build_blocks(grads, damping, options, reduce if block_size is None else None)
        return cls(lambda: [blocks], damping, int(grads.shape[0]))

    def blocks(self) -> Iterator[tuple[AnyBlocks, Columns]]:
        """All blocks, each with the places of its weights."""
        for group in self.groups():
            yield from ((blocks, getattr(blocks, "columns", blocks.run.columns)) for blocks in group)

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        out = torch.empty_like(theta)
        for blocks, columns in self.blocks():
            out[columns] = scores(theta[columns], blocks.diagonal())
        return out

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        """The change by the update "none", "obs" or "joint", and ½ δᵀFδ of it."""
        delta, costs = torch.where(removed, -theta, 0.0), [0.0]
        for blocks, columns in self.blocks():
            here, gone = theta[columns], removed[columns]
            if update == "joint":
                delta[columns], cost = blocks.joint_removal(here, gone)
            else:
                if update == "obs":
                    moved = blocks.apply(single_sums(here, gone, blocks.diagonal()))
                    delta[columns] = torch.where(gone, -here, -moved)
                cost = blocks.cost(delta[columns])
            costs.append(float(cost))
        return delta, sum(costs)

    def group_costs(self, theta: Float[Tensor, " d"], ids: Int[Tensor, " d"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of each of `count` groups, `ids` being each weight's group."""
        out = torch.zeros(count, dtype=torch.float64, device=theta.device)
        for blocks, columns in self.blocks():
            out += blocks.group_costs(theta[columns], ids[columns], count)
        return out

    def greedy_scores(self, theta: Float[Tensor, " d"], count: int) -> Float[Tensor, " d"]:
        """The cost of each weight when the exact greedy order reaches it; infinite beyond the `count` cheapest."""
        found, cheapest, threshold = torch.empty_like(theta), theta[:0], torch.inf
        for blocks, columns in self.blocks():
            run = blocks.run
            if run.length * min(run.length, self.num_grads) > WIDE_PIECE:
                raise ValueError('order="greedy" works on dense blocks; give a block_size, some hundreds at most')
            spread = blocks.spread if isinstance(blocks, RowBlocks) else torch.clone
            there = spread(torch.ones_like(theta[columns], dtype=torch.bool)).unflatten(0, (run.count, run.length))
            weights = spread(theta[columns]).view_as(there)
            costs = torch.empty_like(weights)
            for some, inverse in blocks.inverses():
                costs[some] = greedy_costs(inverse, weights[some], threshold, ~there[some])
                cheapest = torch.cat((cheapest, costs[some][there[some]])).sort().values[:count]
                if len(cheapest) == count:  # later blocks need not go beyond it
                    threshold = float(cheapest[-1])
            found[columns] = costs[there]
        return found

    def group_inverses(self, positions: Int[Tensor, "groups size"]) -> Float[Tensor, "groups size size"]:
        """[F⁻¹]_QQ of every group Q; zero between blocks, and where a weight is absent (at position −1)."""
        size = positions.shape[1]
        a, b = torch.triu_indices(size, size, device=positions.device)
        group, pair = ((positions[:, a] >= 0) & (positions[:, b] >= 0)).nonzero(as_tuple=True)
        i, j = a[pair], b[pair]
        inverse = torch.zeros(len(positions), size, size, dtype=torch.float64, device=positions.device)
        for blocks, columns in self.blocks():
            place = torch.full((int(positions.max()) + 2,), -1, device=positions.device)  # the last is for −1
            place[:-1][columns] = torch.arange(len(place[:-1][columns]), device=positions.device)
            left, right = place[positions[group, i]], place[positions[group, j]]
            inside = (left >= 0) & (right >= 0)
            values = blocks.elements(left[inside], right[inside])
            at = group[inside], i[inside], j[inside]
            inverse[at] = inverse[at[0], at[2], at[1]] = values
        return inverse

"""The damped Fisher matrix as pruning needs it: the cost of removing weights, and the update of the kept ones."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.inverse_fisher import Blocks, Ranks
from mfac.pages import WIDE_PIECE
from mfac.primal import Couple, PrimalBlocks
from mfac.pruning.kronecker import KroneckerBlocks
from mfac.static import BlockOptions, build_blocks
from mfac.woodbury import scores, single_sums

ALONE = Ranks()


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


class PlacedBlocks(NamedTuple):
    """Blocks, and the places of their weights among all d; d itself is the place of what is no weight.

    Where there is no weight, F is λ and θ zero, so nothing moves because of it. `couple` is what the blocks have to do
    with one another, if anything.
    """

    blocks: Blocks | KroneckerBlocks
    places: slice | Int[Tensor, " n"]
    couple: Couple | None = None

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        if self.couple is not None and isinstance(self.blocks, PrimalBlocks):
            return self.blocks.coupled_removal(theta, removed, self.couple)
        return self.blocks.joint_removal(theta, removed)


class FisherCurvature:
    """Blocks of the damped F, or all of it, in groups: `groups()` gives them one after the other, some anew each time.

    With several `ranks`, each has a share of the weights: its own blocks, if they are `divided`, or its columns of one
    matrix, which sums over the ranks itself. Vectors are over all weights, with the same bits on every rank.
    """

    def __init__(
        self, groups: Callable[[], Iterable[Sequence[PlacedBlocks]]], damping: float, num_grads: int,
        ranks: Ranks = ALONE, divided: bool = True,
    ):  # fmt: skip
        self.groups, self.damping, self.num_grads = groups, damping, num_grads
        self._ranks, self._divided = ranks, divided

    @classmethod
    def of_rows(
        cls, grads: Tensor | GradientFile | FisherBlocks, damping: float, block_size: int | None,
        sizes: Sequence[int], device: torch.device, ranks: Ranks = ALONE, start: int = 0,
    ) -> "FisherCurvature":  # fmt: skip
        """F = λI + GᵀG/m from rows in memory, on disk, or summed into blocks.

        `sizes` are the kept weights of each tensor; no block straddles two of them. With several ranks, `start` is the
        first column of this rank's share.
        """
        divided = block_size is not None
        options = BlockOptions(block_size, sizes if divided else None, device=device)
        if isinstance(grads, FisherBlocks):
            options = BlockOptions(device=device)
        options.check(grads, damping)
        blocks = build_blocks(grads, damping, options, None if divided or ranks.size == 1 else ranks.sum_)
        placed = [PlacedBlocks(b, slice(start + b.run.start, start + b.run.stop)) for b in blocks]
        return cls(lambda: [placed], damping, int(grads.shape[0]), ranks, divided)

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        theta, out = F.pad(theta, (0, 1)), theta.new_zeros(len(theta) + 1)
        with self._ranks.together("scoring"):  # diagonals need no other rank, those of the full matrix neither
            for part in self._parts():
                out[part.places] = scores(theta[part.places], part.blocks.diagonal())
        return self._ranks.sum_(out)[:-1]

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], float]:
        """The change by the update "none", "obs" or "joint", and ½ δᵀFδ of it."""
        theta, removed, delta = F.pad(theta, (0, 1)), F.pad(removed, (0, 1)), theta.new_zeros(len(theta) + 1)
        cost = theta.new_zeros(())
        with self._alone("removing weights"):
            for part in self._parts():
                here, gone, blocks = theta[part.places], removed[part.places], part.blocks
                if update == "joint":
                    moved, added = part.joint_removal(here, gone)
                else:
                    single = single_sums(here, gone, blocks.diagonal()) if update == "obs" else None
                    moved = torch.where(gone, -here, 0.0 if single is None else -blocks.apply(single))
                    added = blocks.cost(moved)
                delta[part.places] = moved
                cost += added
        return self._ranks.sum_(delta)[:-1], float(self._ranks.sum_(cost) if self._divided else cost)

    def group_costs(self, theta: Float[Tensor, " d"], ids: Int[Tensor, " d"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of each of `count` groups, `ids` being each weight's group."""
        theta, ids, out = F.pad(theta, (0, 1)), F.pad(ids, (0, 1), value=count), theta.new_zeros(count + 1)
        with self._alone("the costs of slices"):  # of the full matrix each slice must be on one rank
            for part in self._parts():
                out += part.blocks.group_costs(theta[part.places], ids[part.places], count + 1)
        return self._ranks.sum_(out)[:-1]

    def greedy_scores(self, theta: Float[Tensor, " d"], count: int) -> Float[Tensor, " d"]:
        """The cost of each weight when the exact greedy order reaches it; infinite beyond the `count` cheapest."""
        d, theta, out = len(theta), F.pad(theta, (0, 1)), theta.new_zeros(len(theta) + 1)
        cheapest, threshold, everywhere = theta[:0], torch.inf, torch.arange(d + 1, device=theta.device)
        with self._ranks.together("the greedy order"):
            for part in self._parts():
                run = part.blocks.run
                if run.length * min(run.length, self.num_grads) > WIDE_PIECE:
                    raise ValueError('order="greedy" works on dense blocks; give a block_size, some hundreds at most')
                places = everywhere[part.places].view(run.count, run.length)
                for some, inverse in part.blocks.inverses():
                    absent = places[some] == d
                    costs = greedy_costs(inverse, theta[places[some]], threshold, absent)
                    cheapest = torch.cat((cheapest, costs[~absent])).sort().values[:count]
                    if len(cheapest) == count:  # later blocks need not go beyond it
                        threshold = float(cheapest[-1])
                    out[places[some]] = costs
        return self._ranks.sum_(out)[:-1]

    def group_inverses(self, positions: Int[Tensor, "groups size"]) -> Float[Tensor, "groups size size"]:
        """[F⁻¹]_QQ of every group Q; zero between blocks, and where a weight is absent (at position −1)."""
        size, d, device = positions.shape[1], int(positions.max()) + 1, positions.device
        a, b = torch.triu_indices(size, size, device=device)
        group, pair = ((positions[:, a] >= 0) & (positions[:, b] >= 0)).nonzero(as_tuple=True)
        i, j = a[pair], b[pair]
        inverse = torch.zeros(len(positions), size, size, dtype=torch.float64, device=device)
        with self._alone("the order inside groups"):  # the full matrix is divided so that no group is
            for part in self._parts():
                inner = torch.full((d + 1,), -1, device=device)
                inner[part.places] = torch.arange(len(inner[part.places]), device=device)
                left, right = inner[positions[group, i]], inner[positions[group, j]]
                inside = (left >= 0) & (right >= 0)
                values = part.blocks.elements(left[inside], right[inside])
                at = group[inside], i[inside], j[inside]
                inverse[at] = inverse[at[0], at[2], at[1]] = values
        return self._ranks.sum_(inverse)

    def _parts(self) -> Iterator[PlacedBlocks]:
        for group in self.groups():
            yield from group

    def _alone(self, what: str) -> AbstractContextManager[None]:
        """For work on this rank's own blocks, which fails on all ranks or none; the full matrix sums inside."""
        return self._ranks.together(what) if self._divided else nullcontext()


def greedy_costs(
    inverse: Float[Tensor, "blocks b b"], theta: Float[Tensor, "blocks b"], threshold: float = torch.inf,
    absent: Bool[Tensor, "blocks b"] | None = None,
) -> Float[Tensor, "blocks b"]:  # fmt: skip
    """The loss added by removing each weight, after those that are cheaper.

    Removing p moves θ by −θ_p F⁻¹e_p/[F⁻¹]_pp and takes p out of F⁻¹ (F⁻¹ − F⁻¹e_p e_pᵀF⁻¹/[F⁻¹]_pp). Each cost is
    larger than the one before it in its block, if only by the last bit, so that the cheapest weights of all blocks are
    the first ones of each. Costs above the `threshold` are not needed; weights that are not reached get infinity.
    `absent` places have no weight, and `inverse` is the identity there.
    """
    inverse, theta = inverse.clone(), theta.clone()
    costs = torch.full_like(theta, torch.inf)
    gone = torch.zeros_like(theta, dtype=torch.bool) if absent is None else absent.clone()
    theta[gone] = 0
    highest = theta.new_zeros(len(theta))
    beyond = torch.full_like(highest, torch.inf)
    every = torch.arange(len(theta), device=theta.device)
    for _ in range(theta.shape[1]):
        single = torch.where(gone, torch.inf, scores(theta, inverse.diagonal(dim1=1, dim2=2)))
        least, p = single.min(1)
        highest = torch.maximum(torch.nextafter(highest, beyond), least)
        # In a block with nothing left, the minimum is infinite and falls on a weight that has its cost already.
        costs[every, p] = torch.minimum(costs[every, p], highest)
        if bool((highest > threshold).all()):
            break
        column = inverse[every, :, p]
        pivot = column[every, p][:, None]
        theta -= theta[every, p][:, None] * column / pivot
        inverse -= (column / pivot)[:, :, None] * column[:, None, :]
        gone[every, p] = True
        theta[gone] = 0
        # Removed weights have rows and columns of zeros up to rounding; a positive diagonal keeps the division finite.
        inverse.diagonal(dim1=1, dim2=2)[gone] = 1
    return costs

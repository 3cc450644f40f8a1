"""Which weights are removed: the cheapest of each pool, with a floor under every tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.layout import ParameterLayout
from mfac.pruning.budget import Pool
from mfac.pruning.curvature import Curvature, FisherCurvature
from mfac.pruning.greedy import greedy_costs
from mfac.pruning.patterns import NOfM, Pattern, Slices


@dataclass(frozen=True)
class Selection:
    """How weights are selected: the pattern, the order, the least that each tensor keeps, its dimension of inputs."""

    pattern: Pattern
    order: str
    floors: Mapping[str, int]
    inputs: Mapping[str, int]

    def choose(
        self, curvature: Curvature, theta: Float[Tensor, " d"], layout: ParameterLayout,
        masks: Mapping[str, Tensor], pools: Sequence[Pool],
    ) -> dict[str, Tensor]:  # fmt: skip
        """{name: bool tensor}, True for the weights that a step removes so that the pools keep what they should."""
        if isinstance(self.pattern, Slices):
            ids, ranges = self.pattern.groups(masks, self.inputs)
            costs, sizes = _slice_costs(ids, ranges, curvature, theta, layout)
            chosen = torch.zeros(len(costs), dtype=torch.bool, device=theta.device)
            chosen[sorted(cheapest_slices(costs, sizes, ranges, pools, self.floors))] = True
            return {name: chosen[ids[name]] & mask for name, mask in masks.items()}
        if isinstance(curvature, FisherCurvature) and isinstance(self.pattern, NOfM):
            each = self._costs_in_groups(self.pattern, curvature, theta, layout, masks)
        elif isinstance(curvature, FisherCurvature) and self.order == "greedy":
            # Weights that a floor keeps must not use up the count.
            count = layout.dim - sum(pool.keep for pool in pools) + sum(self.floors.values())
            each = layout.unflatten(curvature.greedy_scores(theta, count if len(pools) == 1 else layout.dim))
        else:
            each = layout.unflatten(curvature.scores(theta))
        if isinstance(self.pattern, NOfM):
            each = {name: self.pattern.offered(value, masks[name], self.inputs[name]) for name, value in each.items()}
        return _cheapest(each, masks, pools, self.floors)

    def _costs_in_groups(
        self, pattern: NOfM, curvature: FisherCurvature, theta: Tensor, layout: ParameterLayout,
        masks: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The cost of each weight when the exact greedy order inside its group reaches it."""
        slots = dict(zip(layout.names, layout.slots, strict=True))
        each = [pattern.positions(masks[name], slot.start, self.inputs[name]) for name, slot in slots.items()]
        positions = torch.cat(each)
        inverse, absent = curvature.group_inverses(positions), positions < 0
        inverse.diagonal(dim1=1, dim2=2)[absent] = 1
        costs = greedy_costs(inverse, theta[positions.clamp_min(0)], absent=absent)
        parts = zip(layout.names, costs.split([len(p) for p in each]), strict=True)
        return {name: pattern.ungrouped(part, masks[name].shape, self.inputs[name]) for name, part in parts}


def cheapest_slices(
    costs: Float[Tensor, " groups"], sizes: Int[Tensor, " groups"], ranges: Mapping[str, range],
    pools: Sequence[Pool], floors: Mapping[str, int],
) -> set[int]:  # fmt: skip
    """The slices to remove: those of the lowest cost per weight, while the pools and floors keep enough weights.

    `ranges` are each tensor's slices, and `sizes` how many weights each still has; a tensor keeps its last slice.
    """
    chosen: set[int] = set()
    weights = sizes.tolist()
    each = (costs / sizes.clamp_min(1)).tolist()
    for pool in pools:
        owner = {group: name for name in pool.names for group in ranges[name] if weights[group]}
        left = {name: sum(weights[group] for group in ranges[name]) for name in pool.names}
        slices_left = {name: sum(1 for group in ranges[name] if weights[group]) for name in pool.names}
        spare = sum(left.values()) - pool.keep
        for group in sorted(owner, key=each.__getitem__):
            name, size = owner[group], weights[group]
            if size <= spare and slices_left[name] > 1 and left[name] - size >= floors[name]:
                chosen.add(group)
                spare -= size
                left[name] -= size
                slices_left[name] -= 1
    return chosen


def _slice_costs(
    ids: Mapping[str, Tensor], ranges: Mapping[str, range], curvature: Curvature, theta: Tensor, layout: ParameterLayout
) -> tuple[Float[Tensor, " groups"], Int[Tensor, " groups"]]:
    groups = torch.empty(layout.dim, dtype=torch.int64, device=theta.device)
    layout.flatten([ids[name] for name in layout.names], groups)
    count = max(numbers.stop for numbers in ranges.values())
    sizes = torch.bincount(groups, minlength=count)
    if isinstance(curvature, FisherCurvature):
        return curvature.group_costs(theta, groups, count), sizes
    costs = torch.zeros(count, dtype=torch.float64, device=theta.device)
    return costs.index_add_(0, groups, curvature.scores(theta)), sizes


def _cheapest(
    costs: Mapping[str, Tensor], masks: Mapping[str, Tensor], pools: Sequence[Pool], floors: Mapping[str, int]
) -> dict[str, Tensor]:
    """{name: bool tensor}, True for the cheapest weights of each pool; an infinite cost keeps a weight."""
    chosen = {}
    for pool in pools:
        flat = torch.cat([_above_floor(costs[name], masks[name], floors[name]) for name in pool.names])
        count = sum(int(masks[name].sum()) for name in pool.names) - pool.keep
        removed = torch.zeros_like(flat, dtype=torch.bool)
        removed[torch.topk(flat, max(0, count), largest=False).indices] = True
        parts = (removed & torch.isfinite(flat)).split([masks[name].numel() for name in pool.names])
        chosen.update({name: part.view_as(masks[name]) for name, part in zip(pool.names, parts, strict=True)})
    return chosen


def _above_floor(costs: Tensor, mask: Tensor, floor: int) -> Tensor:
    """The costs in a row, infinite for removed weights and for the `floor` most expensive ones."""
    offered = torch.where(mask, costs, torch.inf).flatten()
    if floor > 0:
        last = torch.topk(torch.where(mask, costs, -torch.inf).flatten(), min(floor, mask.numel())).indices
        offered[last] = torch.inf
    return offered

"""Which weights each step removes: how many, in integers that end at the sparsity asked for; the cheapest of each pool.

A floor stays under every tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.layout import ParameterLayout
from mfac.pruning.curvature import Curvature, FisherCurvature, greedy_costs
from mfac.pruning.options import PruningOptions, is_number
from mfac.pruning.patterns import NOfM, Pattern, Slices, parse_pattern
from mfac.pruning.weights import MaskedWeights, matching_ids

Sparsity = float | Mapping[str, float] | None


@dataclass(frozen=True)
class Pool:
    """Tensors whose weights compete with one another, and how many of them are to be kept."""

    names: tuple[str, ...]
    keep: int


def plan_steps(
    weights: MaskedWeights, sparsity: Sparsity, options: PruningOptions, floors: Mapping[str, int]
) -> list[list[Pool]]:
    """What each step keeps, from the present masks to the sparsity; raises ValueError if that cannot be reached."""
    pattern = parse_pattern(options.pattern)
    if pattern is not None:
        for name, mask in weights.masks.items():
            pattern.check(name, mask.shape, weights.inputs[name])
    if isinstance(pattern, NOfM):
        pools = _pattern_pools(weights, sparsity, options.scope, pattern)
    else:
        pools = _sparsity_pools(weights, sparsity, options.scope)
        for pool in pools:
            _check_pool(pool, weights.masks, sum(floors[name] for name in pool.names))
    kept = [sum(int(weights.masks[name].sum()) for name in pool.names) for pool in pools]
    return step_pools(pools, kept, options.recomputations)


def least_kept(masks: Mapping[str, Tensor], floor: float) -> dict[str, int]:
    """How many weights each tensor keeps at least; a floor below 1 is a fraction of it."""
    floors = {name: math.ceil(floor * mask.numel()) if floor < 1 else int(floor) for name, mask in masks.items()}
    return {name: min(floors[name], int(mask.sum())) for name, mask in masks.items()}


def step_pools(pools: Sequence[Pool], kept_now: Sequence[int], recomputations: int) -> list[list[Pool]]:
    """The pools after each step that removes something; all keep the same fraction of the remaining weights."""
    steps = [[Pool(pool.names, now) for pool, now in zip(pools, kept_now, strict=True)]]
    for step in range(1, recomputations + 1):
        ends = zip(pools, kept_now, strict=True)
        after = [Pool(pool.names, _geometric(now, pool.keep, step / recomputations)) for pool, now in ends]
        if after != steps[-1]:
            steps.append(after)
    return steps[1:]


def check_sparsity(sparsity: float) -> float:
    """The sparsity itself; raises ValueError if it is not a number from 0 to 1."""
    if not is_number(sparsity) or not 0 <= sparsity <= 1:
        hint = f"; did you mean {sparsity / 100:g}?" if is_number(sparsity) and 1 < sparsity < 100 else ""
        raise ValueError(f"sparsity is the fraction of zeros, a number from 0 to 1, not {sparsity!r}{hint}")
    return float(sparsity)


def _pattern_pools(weights: MaskedWeights, sparsity: Sparsity, scope: str, pattern: NOfM) -> list[Pool]:
    if sparsity is not None and not (isinstance(sparsity, float) and abs(sparsity - pattern.sparsity) < 1e-9):
        own = f"pattern {pattern} implies a sparsity of {pattern.sparsity:g}"
        raise ValueError(f"{own}; pass sparsity=None, not {sparsity!r}")
    masks = weights.masks
    each = [Pool((name,), pattern.final_keep(mask, weights.inputs[name])) for name, mask in masks.items()]
    return each if scope == "layer" else [Pool(tuple(masks), sum(pool.keep for pool in each))]


def _sparsity_pools(weights: MaskedWeights, sparsity: Sparsity, scope: str) -> list[Pool]:
    """What is kept at the end: `round(sparsity · count)` weights are removed, of all targets or of each."""
    if sparsity is None:
        raise ValueError('sparsity=None requires an "N:M" pattern, which implies one; give a number from 0 to 1')
    sizes = {name: mask.numel() for name, mask in weights.masks.items()}
    if isinstance(sparsity, Mapping):
        each = {}  # where several patterns match one target, the last counts
        for item, value in sparsity.items():
            ids = matching_ids(weights.model, item, "sparsity")
            each.update({name: value for name, tensor in weights.targets.items() if id(tensor) in ids})
        return [Pool((name,), size - round(check_sparsity(each[name]) * size)) for name, size in sizes.items()]
    removed = round(check_sparsity(sparsity) * sum(sizes.values()))
    if scope == "global":
        return [Pool(tuple(sizes), sum(sizes.values()) - removed)]
    shares = _shares([sparsity * size for size in sizes.values()], removed)
    return [Pool((name,), size - share) for (name, size), share in zip(sizes.items(), shares, strict=True)]


def _geometric(now: int, end: int, fraction: float) -> int:
    """now^(1−f) · end^f, rounded; equal parts instead where nothing is kept at the end."""
    if end == 0 or fraction == 1:
        return round(now * (1 - fraction)) + end
    return round(math.exp((1 - fraction) * math.log(now) + fraction * math.log(end)))


def _shares(exact: Sequence[float], total: int) -> list[int]:
    """Integers that add up to `total`, each within one of its exact share: the largest remainders are rounded up."""
    shares = [math.floor(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _check_pool(pool: Pool, masks: Mapping[str, Tensor], floor: int) -> None:
    size = sum(masks[name].numel() for name in pool.names)
    kept = sum(int(masks[name].sum()) for name in pool.names)
    where = f"{pool.names[0]}: " if len(pool.names) == 1 else ""
    if pool.keep > kept:
        raise ValueError(
            f"{where}the requested sparsity, {1 - pool.keep / size:.4g}, is below the present one, "
            f"{1 - kept / size:.4g} ({size - kept} of {size} weights are removed by the masks); request a higher one"
        )
    if pool.keep < floor:
        raise ValueError(
            f"{where}sparsity {1 - pool.keep / size:.6g} leaves {pool.keep} of {size} weights, and the floor keeps "
            f"{floor} of them; request a sparsity of at most {1 - floor / size:.6g}, or lower the floor"
        )


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
    offered[torch.topk(torch.where(mask, costs, -torch.inf).flatten(), floor).indices] = torch.inf
    return offered

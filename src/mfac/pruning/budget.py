"""How many weights each step removes, in integers, so that the last step reaches the requested sparsity exactly."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mfac.pruning.options import PruningOptions, is_number
from mfac.pruning.patterns import NOfM, parse_pattern
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
    return sparsity


def _pattern_pools(weights: MaskedWeights, sparsity: Sparsity, scope: str, pattern: NOfM) -> list[Pool]:
    if sparsity is not None and not (isinstance(sparsity, float) and abs(sparsity - pattern.sparsity) < 1e-9):
        own = f"pattern {pattern} has a sparsity of its own, {pattern.sparsity:g}"
        raise ValueError(f"{own}; pass sparsity=None, not {sparsity!r}")
    masks = weights.masks
    each = [Pool((name,), pattern.final_keep(mask, weights.inputs[name])) for name, mask in masks.items()]
    return each if scope == "layer" else [Pool(tuple(masks), sum(pool.keep for pool in each))]


def _sparsity_pools(weights: MaskedWeights, sparsity: Sparsity, scope: str) -> list[Pool]:
    """What is kept at the end: `round(sparsity · count)` weights are removed, of all targets or of each."""
    if sparsity is None:
        raise ValueError('sparsity=None requires an "N:M" pattern, which has its own; give a number from 0 to 1')
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

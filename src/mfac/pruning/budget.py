"""How many weights go at which step, in integers, so that the last step lands exactly on the sparsity asked for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Scope = Literal["global", "layer"]


@dataclass(frozen=True)
class Pool:
    """Tensors whose weights compete with one another, and how many of them are to be kept."""

    names: tuple[str, ...]
    keep: int


@dataclass(frozen=True)
class Count:
    """One tensor: its weights, those that are kept now, and the least that must be kept."""

    size: int
    kept: int
    floor: int


def tensor_counts(masks: Mapping[str, Tensor], floor: float) -> dict[str, Count]:
    """The counts of every tensor; a floor below 1 is a fraction of it.

    Raises:
        ValueError: a floor that is neither a fraction nor a number of weights.
    """
    if isinstance(floor, bool) or not isinstance(floor, int | float) or floor < 0 or (floor > 1 and floor % 1):
        raise ValueError(f"floor is a number of weights or, below 1, a fraction of every tensor, not {floor!r}")
    counts = {}
    for name, mask in masks.items():
        least = math.ceil(floor * mask.numel()) if floor < 1 else int(floor)
        counts[name] = Count(mask.numel(), int(mask.sum()), min(least, int(mask.sum())))
    return counts


def final_pools(counts: Mapping[str, Count], sparsity: float | Mapping[str, float], scope: Scope) -> list[Pool]:
    """What is to be kept at the end: `round(sparsity · count)` weights are gone.

    Args:
        counts: the targets.
        sparsity: of all targets together; or one for each of them, which makes each a pool of its own.
        scope: "global": all weights compete; "layer": each tensor has the same sparsity, within one weight.

    Raises:
        ValueError: a sparsity that is not in [0, 1], below the present one, or more than the floors allow.
    """
    if isinstance(sparsity, Mapping):
        pools = [Pool((name,), c.size - round(check_sparsity(sparsity[name]) * c.size)) for name, c in counts.items()]
    else:
        check_sparsity(sparsity)
        total = sum(c.size for c in counts.values())
        removed = round(sparsity * total)
        if scope == "global":
            pools = [Pool(tuple(counts), total - removed)]
        elif scope == "layer":
            shares = _shares([sparsity * c.size for c in counts.values()], removed)
            pools = [Pool((name,), c.size - n) for (name, c), n in zip(counts.items(), shares, strict=True)]
        else:
            raise ValueError(f'scope must be "global" or "layer", not {scope!r}')
    for pool in pools:
        _check_pool(pool, counts)
    return pools


def step_pools(pools: Sequence[Pool], kept_now: Sequence[int], recomputations: int) -> list[list[Pool]]:
    """The pools after each step: each step keeps the same fraction ((1−t)/(1−i))^(1/k) of what the one before kept.

    Steps at which nothing would go are left out.
    """
    steps, before = [], list(kept_now)
    for step in range(1, recomputations + 1):
        keep = [
            pool.keep if step == recomputations else _geometric(now, pool.keep, step / recomputations)
            for pool, now in zip(pools, kept_now, strict=True)
        ]
        if keep != before:
            steps.append([Pool(pool.names, k) for pool, k in zip(pools, keep, strict=True)])
        before = keep
    return steps


def check_sparsity(sparsity: float) -> float:
    """The sparsity, if it is a number from 0 to 1.

    Raises:
        ValueError: it is not.
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity <= 1:
        raise ValueError(
            f"sparsity is the fraction of weights that are zero, a number from 0 to 1, not {sparsity!r}"
            + (
                f"; did you mean {sparsity / 100:g}?"
                if isinstance(sparsity, int | float) and 1 < sparsity < 100
                else ""
            )
        )
    return sparsity


def _geometric(now: int, end: int, fraction: float) -> int:
    """now^(1−f) · end^f, rounded; where nothing is to be left at the end, in equal parts instead."""
    if end == 0:
        return round(now * (1 - fraction))
    return round(math.exp((1 - fraction) * math.log(now) + fraction * math.log(end)))


def _shares(exact: Sequence[float], total: int) -> list[int]:
    """Integers that add up to `total`, each within one of its exact share: the largest remainders are rounded up."""
    shares = [math.floor(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _check_pool(pool: Pool, counts: Mapping[str, Count]) -> None:
    size = sum(counts[name].size for name in pool.names)
    kept = sum(counts[name].kept for name in pool.names)
    floor = sum(counts[name].floor for name in pool.names)
    where = f"{pool.names[0]}: " if len(pool.names) == 1 else ""
    if pool.keep > kept:
        raise ValueError(
            f"{where}the sparsity asked for, {1 - pool.keep / size:.4g}, is below the present one, "
            f"{1 - kept / size:.4g} ({size - kept} of {size} weights are removed by the masks); removed weights do not "
            "come back: ask for more, or pass other masks"
        )
    if pool.keep < floor:
        raise ValueError(
            f"{where}sparsity {1 - pool.keep / size:.6g} leaves {pool.keep} of {size} weights, and the floor keeps "
            f"{floor} of them so that no layer dies; ask for a sparsity of at most {1 - floor / size:.6g}, or "
            "lower floor"
        )

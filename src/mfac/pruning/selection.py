"""Which weights go: the cheapest of each pool, with a floor under every tensor."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mfac.pruning.budget import Pool


def cheapest(
    costs: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    pools: Sequence[Pool],
    floors: Mapping[str, int],
) -> dict[str, Tensor]:
    """{name: bool tensor}, True for the weights that go now.

    Args:
        costs: of every weight; infinite for those that may not go at this step.
        masks: True = kept until now.
        pools: how many weights are to be kept in each set of tensors.
        floors: the least that each tensor keeps.
    """
    chosen = {}
    for pool in pools:
        offered = [_above_floor(costs[name], masks[name], floors[name]) for name in pool.names]
        count = sum(int(masks[name].sum()) for name in pool.names) - pool.keep
        flat = torch.cat([cost.flatten() for cost in offered])
        removed = smallest(flat, count) & torch.isfinite(flat)
        parts = removed.split([cost.numel() for cost in offered])
        chosen.update({name: part.view_as(masks[name]) for name, part in zip(pool.names, parts, strict=True)})
    return chosen


def smallest(costs: Float[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """True for the `count` smallest."""
    chosen = torch.zeros_like(costs, dtype=torch.bool)
    chosen[torch.topk(costs, max(0, count), largest=False).indices] = True
    return chosen


def _above_floor(costs: Tensor, mask: Tensor, floor: int) -> Tensor:
    """The costs, infinite for what is gone already and for the `floor` weights that would go last."""
    offered = torch.where(mask, costs, torch.inf)
    if floor > 0:
        last = torch.topk(torch.where(mask, costs, -torch.inf).flatten(), min(floor, mask.numel())).indices
        offered.view(-1)[last] = torch.inf
    return offered

"""Which whole slices go, and what each of them costs: ½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q by the m x m dual."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products
from mfac.pruning.budget import Pool
from mfac.pruning.removal import group_costs

GROUP_NUMBERS = 1 << 22  # in the m x m matrices that are factored at once


def block_group_costs(
    G: Float[Tensor, "blocks m b"],
    theta: Float[Tensor, "blocks b"],
    ids: Int[Tensor, "blocks b"],
    damping: float,
    out: Float[Tensor, " groups"],
) -> None:
    """Adds to `out` what each group's part in each block costs; a group that lies in several blocks is summed."""
    K = products.gram(G, torch.float64)
    blocks, columns = torch.meshgrid(
        torch.arange(G.shape[0], device=G.device), torch.arange(G.shape[2], device=G.device), indexing="ij"
    )
    keys, segment = torch.unique(blocks * len(out) + ids, return_inverse=True)
    order = segment.flatten().argsort(stable=True)
    segment, blocks, columns = segment.flatten()[order], blocks.flatten()[order], columns.flatten()[order]
    lengths = torch.bincount(segment)
    place = torch.arange(len(segment), device=G.device) - (lengths.cumsum(0) - lengths)[segment]
    step = max(1, GROUP_NUMBERS // max(G.shape[1] ** 2, G.shape[1] * int(lengths.max())))
    for first in range(0, len(keys), step):
        inside = ((segment >= first) & (segment < first + step)).nonzero()[:, 0]
        here = keys[first : first + step]
        G_Q = torch.zeros(len(here), int(lengths.max()), G.shape[1], dtype=torch.float64, device=G.device)
        theta_Q = torch.zeros(len(here), int(lengths.max()), dtype=torch.float64, device=G.device)
        where = (segment[inside] - first, place[inside])
        G_Q[where] = G[blocks[inside], :, columns[inside]].double()
        theta_Q[where] = theta[blocks[inside], columns[inside]]
        costs = group_costs(K[here // len(out)], G_Q.transpose(1, 2), theta_Q, damping)
        out.index_add_(0, here % len(out), costs)


def members(ids: Int[Tensor, " n"]) -> Iterator[tuple[int, Int[Tensor, " q"]]]:
    """(group, the positions of its weights) for every group that has any."""
    order = ids.argsort(stable=True)
    groups, lengths = torch.unique_consecutive(ids[order], return_counts=True)
    yield from zip(groups.tolist(), order.split(lengths.tolist()), strict=True)


def cheapest_slices(
    costs: Float[Tensor, " groups"],
    sizes: Int[Tensor, " groups"],
    ranges: Mapping[str, range],
    pools: Sequence[Pool],
    floors: Mapping[str, int],
) -> set[int]:
    """The slices that go: the cheapest a weight, as many as leave no fewer weights than the pools keep.

    Args:
        costs: of every slice.
        sizes: weights that it still has.
        ranges: which slices belong to which tensor.
        pools: how many weights are to be kept in each set of tensors.
        floors: the least that each tensor keeps; the last slice of a tensor never goes.
    """
    chosen: set[int] = set()
    weights = sizes.tolist()
    each = (costs / sizes.clamp_min(1)).tolist()
    for pool in pools:
        owner = {group: name for name in pool.names for group in ranges[name] if weights[group]}
        left = {name: sum(weights[group] for group in ranges[name]) for name in pool.names}
        spare = sum(left.values()) - pool.keep
        slices_left = {name: sum(1 for group in ranges[name] if weights[group]) for name in pool.names}
        for group in sorted(owner, key=each.__getitem__):
            name, size = owner[group], weights[group]
            if size <= spare and slices_left[name] > 1 and left[name] - size >= floors[name]:
                chosen.add(group)
                spare -= size
                left[name] -= size
                slices_left[name] -= 1
    return chosen

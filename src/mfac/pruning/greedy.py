"""The exact greedy order inside blocks: remove the cheapest weight, move the others, remove the next."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def greedy_costs(
    inverse: Float[Tensor, "blocks b b"],
    theta: Float[Tensor, "blocks b"],
    threshold: float = torch.inf,
    absent: Bool[Tensor, "blocks b"] | None = None,
) -> Float[Tensor, "blocks b"]:
    """What each weight's removal adds to the loss when it comes to it, after those that are cheaper.

    Removing p moves θ by −θ_p F⁻¹e_p/[F⁻¹]_pp and takes p out of F⁻¹ (F⁻¹ − F⁻¹e_p e_pᵀF⁻¹/[F⁻¹]_pp). Each cost is
    more than the one before it in its block, if only by the last bit, so that the cheapest weights of all blocks are
    those that go first in each.

    Args:
        inverse: F⁻¹ of every block.
        theta: its weights.
        threshold: costs above it are not needed; what is not reached is infinite.
        absent: places of no weight, whose rows and columns of `inverse` are those of the identity; they never go.
    """
    inverse, theta = inverse.clone(), theta.clone()
    costs = torch.full_like(theta, torch.inf)
    gone = torch.zeros_like(theta, dtype=torch.bool) if absent is None else absent.clone()
    theta[gone] = 0
    highest = theta.new_zeros(len(theta))
    beyond = torch.full_like(highest, torch.inf)
    every = torch.arange(len(theta), device=theta.device)
    for _ in range(theta.shape[1]):
        diagonal = inverse.diagonal(dim1=1, dim2=2)
        single = torch.where(gone, torch.inf, theta.square() / (2 * diagonal))
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
        # What is gone has rows and columns of zeros but for rounding; a positive diagonal keeps the division finite.
        inverse.diagonal(dim1=1, dim2=2)[gone] = 1
    return costs


class CheapestSoFar:
    """The n-th smallest of all costs that were shown: blocks shown later need not go beyond it."""

    def __init__(self, count: int):
        self.count = count
        self.threshold = torch.inf
        self._smallest: Tensor | None = None

    def show(self, costs: Float[Tensor, "blocks b"]) -> None:
        """Takes more costs into account."""
        new = costs[torch.isfinite(costs)]
        pool = new if self._smallest is None else torch.cat((self._smallest, new))
        if len(pool) >= self.count:
            self._smallest = torch.topk(pool, self.count, largest=False).values if self.count else pool[:0]
            self.threshold = float(self._smallest.max()) if self.count else 0.0
        else:
            self._smallest = pool

"""The exact greedy order inside blocks: remove the cheapest weight, update the others, remove the next."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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
        # Removed weights have rows and columns of zeros up to rounding; a positive diagonal keeps the division finite.
        inverse.diagonal(dim1=1, dim2=2)[gone] = 1
    return costs

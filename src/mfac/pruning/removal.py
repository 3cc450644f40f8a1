"""The algebra of removing weights, block by block: pure functions over float64 tensors, in the primal (B x B matrices).

The dual, for blocks of more weights than gradients, is in `mfac.woodbury`. F is the damped Fisher matrix of a block, θ
its weights, Q those that go, R those that stay.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mfac import woodbury


def scores(theta: Float[Tensor, "*d"], inverse_diagonal: Float[Tensor, "*d"]) -> Float[Tensor, "*d"]:
    """ρ_i = θ_i² / (2 [F⁻¹]_ii): what removing weight i alone, and moving all others, adds to the loss."""
    return theta.square() / (2 * inverse_diagonal)


def single_sums(
    theta: Float[Tensor, "*d"], removed: Bool[Tensor, "*d"], inverse_diagonal: Float[Tensor, "*d"]
) -> Float[Tensor, "*d"]:
    """x with −F⁻¹x = Σ_{i in Q} −θ_i F⁻¹e_i / [F⁻¹]_ii: the single-weight updates of the whole set, summed."""
    return torch.where(removed, theta / inverse_diagonal, 0.0)


def primal_removal(
    F: Float[Tensor, "*blocks b b"], theta: Float[Tensor, "*blocks b"], removed: Bool[Tensor, "*blocks b"]
) -> tuple[Float[Tensor, "*blocks b"], Float[Tensor, "*blocks"]]:
    """The joint removal: F_RR δ_R = F_RQ θ_Q and δ_Q = −θ_Q; the change, and ½ δᵀFδ.

    The sets differ from block to block, so F_RR keeps its place in a B x B matrix with ones where Q is.
    """
    kept = ~removed
    gone = torch.where(removed, theta, 0.0)
    right = torch.einsum("...ij,...j->...i", F, gone)
    inner = torch.where(kept[..., :, None] & kept[..., None, :], F, 0.0)
    inner.diagonal(dim1=-2, dim2=-1).add_(removed.to(F.dtype))
    moved = woodbury.solve(woodbury.factor(inner, 0.0, overwrite=True), torch.where(kept, right, 0.0))
    delta = torch.where(removed, -theta, moved)
    # ½ δᵀFδ = ½ (θ_QᵀF_QQθ_Q − θ_QᵀF_QRδ_R): the part on R vanishes where δ_R is the minimum.
    return delta, 0.5 * ((gone * right).sum(-1) - (torch.where(kept, right, 0.0) * moved).sum(-1)).clamp_min(0)


def inverse_removal(
    inverse: Float[Tensor, "*blocks b b"], theta: Float[Tensor, "*blocks b"], removed: Bool[Tensor, "*blocks b"]
) -> tuple[Float[Tensor, "*blocks b"], Float[Tensor, "*blocks"]]:
    """The joint removal from F⁻¹: δ = −F⁻¹_:Q ([F⁻¹]_QQ)⁻¹ θ_Q, and ½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q."""
    gone = torch.where(removed, theta, 0.0)
    inner = torch.where(removed[..., :, None] & removed[..., None, :], inverse, 0.0)
    inner.diagonal(dim1=-2, dim2=-1).add_((~removed).to(inverse.dtype))
    x = torch.where(removed, woodbury.solve(woodbury.factor(inner, 0.0, overwrite=True), gone), 0.0)
    delta = -torch.einsum("...ij,...j->...i", inverse, x)
    return torch.where(removed, -theta, delta), 0.5 * (gone * x).sum(-1)


def group_costs(
    K: Float[Tensor, "*groups m m"],
    G_Q: Float[Tensor, "*groups m q"],
    theta_Q: Float[Tensor, "*groups q"],
    damping: float,
) -> Float[Tensor, "*groups"]:
    """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q for each group Q, by the dual: S_R = S − G_Q G_Qᵀ. Columns of zeros add nothing.

    Args:
        K: G Gᵀ of the block that the group lies in.
        G_Q: the group's columns of G.
        theta_Q: its weights.
        damping: λ.
    """
    u = torch.einsum("...mq,...q->...m", G_Q, theta_Q)
    a = woodbury.removal_coefficients(K - G_Q @ G_Q.transpose(-1, -2), u, K.shape[-1] * damping)
    return woodbury.removal_cost(theta_Q, a, u, damping)

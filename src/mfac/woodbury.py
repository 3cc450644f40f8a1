"""The algebra of F⁻¹ in the m x m dual: pure functions over float64 tensors, with leading batch dimensions for blocks.

Notation (docs/notation.md): F = λ I + (1/m) GᵀG is d x d and never formed; K = G Gᵀ; S = s I + K with the shift
s = m λ; L Lᵀ = S; W = L⁻¹ G; P = S⁻¹.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def factor(K: Float[Tensor, "*blocks m m"], shift: float, overwrite: bool = False) -> Float[Tensor, "*blocks m m"]:
    """L with L Lᵀ = S = shift · I + K; with `overwrite`, K becomes S on the way.

    Raises:
        torch.linalg.LinAlgError: S is not positive definite in float64.
    """
    S = K if overwrite else K.clone()
    S.diagonal(dim1=-2, dim2=-1).add_(shift)
    L, info = torch.linalg.cholesky_ex(S)
    if bool((info != 0).any()):
        largest = S.diagonal(dim1=-2, dim2=-1).max().item() - shift
        remedy = max(10.0, K.shape[-1] * largest / (1e14 * shift))
        raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
            f"the damped Gram matrix is not positive definite in float64: the damping adds {shift:.3g} to squared "
            f"gradients of up to {largest:.3g}, and their ratio is beyond float64; "
            f"raise the damping {remedy:.1g} times or more, or scale the gradients down"
        )
    return L


def inverse_factor(L: Float[Tensor, "*blocks m m"]) -> Float[Tensor, "*blocks m m"]:
    """L⁻¹, lower triangular."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return torch.linalg.solve_triangular(L, eye, upper=False)


def solve(L: Float[Tensor, "*blocks m m"], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """S⁻¹ b by two triangular solves; b holds a vector or a matrix for each block."""
    if b.ndim == L.ndim:
        return torch.cholesky_solve(b, L)
    return torch.cholesky_solve(b[..., None], L)[..., 0]


def half_solve(L: Float[Tensor, "*blocks m m"], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """L⁻¹ b; its squared norm is bᵀ S⁻¹ b."""
    if b.ndim == L.ndim:
        return torch.linalg.solve_triangular(L, b, upper=False)
    return torch.linalg.solve_triangular(L, b[..., None], upper=False)[..., 0]


def log_det(L: Float[Tensor, "*blocks m m"]) -> Float[Tensor, "*blocks"]:
    """log det S = 2 Σ log L_kk."""
    return 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def log_det_fisher(L: Float[Tensor, "*blocks m m"], shift: float, damping: float, dim: int) -> Float[Tensor, "*blocks"]:
    """log det F = d log λ + log det S − m log(shift), from L Lᵀ = S."""
    return dim * math.log(damping) + log_det(L) - L.shape[-1] * math.log(shift)


def inverse_diagonal(
    whitened_squares: Float[Tensor, "*blocks d"], fisher_diagonal: Float[Tensor, "*blocks d"], damping: float
) -> Float[Tensor, "*blocks d"]:
    """[F⁻¹]_ii = (1 − Σ_k W_ki²)/λ, held in [1/F_ii, 1/λ], where it lies but for rounding."""
    exact = (1 - whitened_squares) / damping
    return exact.clamp_max(1 / damping).maximum(fisher_diagonal.reciprocal())


def quadratic_form(
    x_squared: Float[Tensor, "*k"], projected: Float[Tensor, "*k"], curvature: Float[Tensor, "*k"], damping: float
) -> Float[Tensor, "*k"]:
    """xᵀF⁻¹x = (‖x‖² − ‖L⁻¹Gx‖²)/λ, held in [‖x‖⁴/(xᵀFx), ‖x‖²/λ] (Cauchy-Schwarz), so never negative.

    Args:
        x_squared: ‖x‖².
        projected: ‖L⁻¹Gx‖².
        curvature: xᵀFx.
        damping: λ.
    """
    least = torch.where(x_squared > 0, x_squared.square() / curvature, 0.0)
    return ((x_squared - projected) / damping).clamp_max(x_squared / damping).maximum(least)


def removal_coefficients(
    K_kept: Float[Tensor, "*blocks m m"], u: Float[Tensor, "*blocks m"], shift: float
) -> Float[Tensor, "*blocks m"]:
    """a = S_R⁻¹ u, where S_R = shift · I + G_R G_Rᵀ and u = G_Q θ_Q: the weights that stay move by G_Rᵀ a.

    This is the exact joint Optimal Brain Surgeon removal of the set Q, without the #Q x #Q system.
    """
    return solve(factor(K_kept, shift), u)


def removal_cost(
    theta_removed: Float[Tensor, "*blocks d"],
    a: Float[Tensor, "*blocks m"],
    u: Float[Tensor, "*blocks m"],
    damping: float,
) -> Float[Tensor, "*blocks"]:
    """The loss that the joint removal adds on the quadratic model: ½ λ (‖θ_Q‖² + u·S_R⁻¹u)."""
    return 0.5 * damping * (theta_removed.square().sum(-1) + (u * a).sum(-1))


def joint_removal(
    G: Float[Tensor, "*blocks m d"],
    theta: Float[Tensor, "*blocks d"],
    removed: Bool[Tensor, "*blocks d"],
    damping: float,
    K: Float[Tensor, "*blocks m m"] | None = None,
) -> tuple[Float[Tensor, "*blocks d"], Float[Tensor, "*blocks"]]:
    """Removes the weights `removed` at once: what is added to theta (exactly −θ on them), and what it costs.

    δ_R = G_Rᵀ S_R⁻¹ (G_Q θ_Q), the minimum of ½ δᵀFδ under δ_Q = −θ_Q; in float64. With K = G Gᵀ at hand, few removed
    weights cost O(m² #Q) instead of O(m² #R).
    """
    G, theta = G.double(), theta.double()
    gone = torch.where(removed, theta, 0.0)
    u = torch.einsum("...md,...d->...m", G, gone)
    a = removal_coefficients(_kept_gram(G, removed, K), u, G.shape[-2] * damping)
    delta = torch.where(removed, -theta, torch.einsum("...md,...m->...d", G, a))
    return delta, removal_cost(gone, a, u, damping)


def _kept_gram(
    G: Float[Tensor, "*blocks m d"], removed: Bool[Tensor, "*blocks d"], K: Float[Tensor, "*blocks m m"] | None
) -> Float[Tensor, "*blocks m m"]:
    """G_R G_Rᵀ, from whichever set of columns is smaller; blocks, whose sets differ in size, are masked instead."""
    if G.ndim > 2:
        kept = torch.where(removed[..., None, :], 0.0, G)
        return kept @ kept.transpose(-1, -2)
    if K is not None and 2 * int(removed.sum()) < len(removed):
        gone = G[:, removed]
        return K - gone @ gone.T
    kept = G[:, ~removed]
    return kept @ kept.T


def primal_inverse(
    F: Float[Tensor, "*blocks b b"], damping: float
) -> tuple[Float[Tensor, "*blocks b b"], Float[Tensor, "*blocks"]]:
    """(λI + F)⁻¹ and log det (λI + F) of small undamped blocks F, by Cholesky in the primal.

    Raises:
        torch.linalg.LinAlgError: the damped block is not positive definite in float64.
    """
    L = factor(F, damping)
    return torch.cholesky_inverse(L), log_det(L)

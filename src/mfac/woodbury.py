"""The algebra of F⁻¹ and of removing weights: pure functions over float64 tensors, with leading dimensions for blocks.

Notation (docs/notation.md): F = λ I + (1/m) GᵀG is d x d and formed for small blocks only; K = G Gᵀ; S = s I + K with
the shift s = m λ; L Lᵀ = S; W = L⁻¹ G. θ are the weights, Q the removed ones, R the kept ones.
"""

import math
import sys
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TOLERANCE = 1e-3  # of conjugate gradients: the residual beside the right-hand side
POWER_STEPS = 10  # κ is then too small by a third at most, for a start that is not orthogonal to what it looks for
TINY = sys.float_info.min


def factor(K: Float[Tensor, "*blocks m m"], shift: float, overwrite: bool = False) -> Float[Tensor, "*blocks m m"]:
    """L with L Lᵀ = S = shift · I + K; with `overwrite`, K becomes S on the way. LinAlgError if S is indefinite."""
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


def pack(L: Float[Tensor, "*blocks m m"], K: Float[Tensor, "*blocks m m"]) -> Float[Tensor, "*blocks m m"]:
    """L with K mirrored above it, where solves do not look; the diagonal of K is kept apart. K is overwritten.

    Both lie in memory column by column then.
    """
    return L.add_(K.tril_(-1).transpose(-1, -2))


def unpack(packed: Float[Tensor, "*blocks m m"], diagonal: Float[Tensor, "*blocks m"]) -> Float[Tensor, "*blocks m m"]:
    """K again, bit for bit: L Lᵀ − shift · I would have lost it to a large shift."""
    upper = packed.triu(1)
    K = upper + upper.transpose(-1, -2)
    K.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return K


def growth(Linv: Float[Tensor, "*blocks m m"], squares: Float[Tensor, "*blocks m"]) -> Float[Tensor, "*blocks"]:
    """κ = ‖D^½ S⁻¹ D^½‖ with D = diag(squares), from below: power iteration from a fixed start."""
    M = Linv * squares.sqrt()[..., None, :]
    v = torch.rand(M.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu") - 0.5
    v = v.to(M.device).expand(*M.shape[:-1])[..., None]
    for _ in range(POWER_STEPS):
        v = M.transpose(-1, -2) @ (M @ (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp_min(TINY)))
    return torch.linalg.vector_norm(v, dim=(-2, -1))


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


def leverages(
    K: Float[Tensor, "m m"], L: Float[Tensor, "m m"], shift: float
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """h_i = [K S⁻¹]_ii and 1 − h_i = s [S⁻¹]_ii, each with all its digits where it is small."""
    P = torch.cholesky_inverse(L)
    rest = (shift * P.diagonal()).clamp_max(1)
    return torch.where(rest > 0.5, (K * P).sum(-1).clamp_min(0), 1 - rest), rest


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

    `projected` is ‖L⁻¹Gx‖², and `curvature` xᵀFx.
    """
    least = torch.where(x_squared > 0, x_squared.square() / curvature, 0.0)
    return ((x_squared - projected) / damping).clamp_max(x_squared / damping).maximum(least)


def scores(theta: Float[Tensor, "*d"], inverse_diagonal: Float[Tensor, "*d"]) -> Float[Tensor, "*d"]:
    """ρ_i = θ_i² / (2 [F⁻¹]_ii): the loss added by removing weight i alone and adjusting all others."""
    return theta.square() / (2 * inverse_diagonal)


def single_sums(
    theta: Float[Tensor, "*d"], removed: Bool[Tensor, "*d"], inverse_diagonal: Float[Tensor, "*d"]
) -> Float[Tensor, "*d"]:
    """x with −F⁻¹x = Σ_{i in Q} −θ_i F⁻¹e_i / [F⁻¹]_ii: the single-weight updates of the set Q, summed."""
    return torch.where(removed, theta / inverse_diagonal, 0.0)


def removal_cost(
    squares: Float[Tensor, "*blocks"], a: Float[Tensor, "*blocks m"], u: Float[Tensor, "*blocks m"], damping: float
) -> Float[Tensor, "*blocks"]:
    """The loss that the joint removal of Q adds in the quadratic model: ½ λ (‖θ_Q‖² + u·S_R⁻¹u), u = G_Q θ_Q.

    `squares` is ‖θ_Q‖², and a = S_R⁻¹u with S_R = shift · I + G_R G_Rᵀ. The kept weights R move by G_Rᵀa: the exact
    joint Optimal Brain Surgeon update, without the #Q x #Q system.
    """
    return 0.5 * damping * (squares + (u * a).sum(-1))


def group_costs(
    S: Float[Tensor, "*groups m m"], G_Q: Float[Tensor, "*groups m q"], theta_Q: Float[Tensor, "*groups q"],
    damping: float,
) -> Float[Tensor, "*groups"]:  # fmt: skip
    """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q for each group Q, by the dual: S_R = S − G_Q G_Qᵀ. Columns of zeros add nothing."""
    u = torch.einsum("...mq,...q->...m", G_Q, theta_Q)
    a = solve(factor(S - G_Q @ G_Q.transpose(-1, -2), 0.0, overwrite=True), u)
    return removal_cost(theta_Q.square().sum(-1), a, u, damping)


def kept_factor(F: Float[Tensor, "*blocks b b"], removed: Bool[Tensor, "*blocks b"]) -> Float[Tensor, "*blocks b b"]:
    """The factor of F_RR, in its place in a B x B matrix with ones where Q is: the sets differ from block to block."""
    kept = ~removed
    inner = torch.where(kept[..., :, None] & kept[..., None, :], F, 0.0)
    inner.diagonal(dim1=-2, dim2=-1).add_(removed.to(F.dtype))
    return factor(inner, 0.0, overwrite=True)


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], right: Float[Tensor, "..."],
    most: int = 300, tolerance: float | None = None,
    dot: Callable[[Tensor, Tensor], Tensor] = lambda a, b: (a * b).sum(),
) -> Float[Tensor, "..."]:  # fmt: skip
    """x with apply(x) = right for a symmetric positive definite `apply`, until the residual is small beside `right`.

    With a `dot` of columns, each column is a system of its own. Where `apply` turns out not to be positive definite,
    x stays what it is then; if that is at the first step, it is precondition(right).
    """
    r = right
    x = p = z = precondition(r)
    rz, squares = dot(r, z), dot(r, r)
    going, enough = squares > 0, (TOLERANCE if tolerance is None else tolerance) ** 2 * squares
    for number in range(most):
        if not bool(going.any()):
            break
        q = apply(p)
        curvature = dot(p, q)
        step = rz / curvature
        going = going & (curvature > 0) & (step > 0) & (step < torch.inf)
        x = torch.where(going, x * (number > 0) + step * p, x)
        r = torch.where(going, r - step * q, r)
        z = precondition(r)
        rz, before = dot(r, z), rz
        p = z + torch.where(going, rz / before, 0.0) * p
        going = going & (dot(r, r) > enough)
    return x


def iterated_removal(
    apply: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], theta: Float[Tensor, " n"],
    removed: Bool[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:  # fmt: skip
    """The joint removal where F is known by products only: conjugate gradients over the kept weights."""
    gone = torch.where(removed, theta, 0.0)

    def kept(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return torch.where(removed, 0.0, x)

    moved = conjugate_gradients(lambda x: kept(apply(x)), lambda r: kept(precondition(r)), kept(apply(gone)))
    delta = moved - gone
    return delta, (delta * apply(delta)).sum() / 2


def primal_removal(
    F: Float[Tensor, "*blocks b b"], theta: Float[Tensor, "*blocks b"], removed: Bool[Tensor, "*blocks b"]
) -> tuple[Float[Tensor, "*blocks b"], Float[Tensor, "*blocks"]]:
    """The joint removal by the damped F: F_RR δ_R = F_RQ θ_Q and δ_Q = −θ_Q; the change, and ½ δᵀFδ."""
    kept = ~removed
    gone = torch.where(removed, theta, 0.0)
    right = torch.einsum("...ij,...j->...i", F, gone)
    moved = solve(kept_factor(F, removed), torch.where(kept, right, 0.0))
    delta = torch.where(removed, -theta, moved)
    # ½ δᵀFδ = ½ (θ_QᵀF_QQθ_Q − θ_QᵀF_QRδ_R): the part on R vanishes where δ_R is the minimum.
    return delta, 0.5 * ((gone * right).sum(-1) - (torch.where(kept, right, 0.0) * moved).sum(-1)).clamp_min(0)

"""The paper's algorithms, literally (Frantar, Kurtic, Alistarh: M-FAC, NeurIPS 2021), for tests and benchmarks only.

Loops as in the paper, with indices from 0 and its misprints corrected (docs/algorithm.md lists them). The arithmetic is
in the dtype of the arguments; `damping` is λ.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def dynamic_setup(GGt: Float[Tensor, "m m"], damping: float) -> tuple[Float[Tensor, "m m"], Float[Tensor, "m m"]]:
    """Algorithm 1: D and B from the scalar products G Gᵀ, in O(m³).

    Corrected: the outer product is of row i − 1 from column i on.
    """
    m = len(GGt)
    D = GGt / damping
    B = torch.eye(m, dtype=GGt.dtype, device=GGt.device) / damping
    for i in range(1, m):
        D[i:, i:] -= torch.outer(D[i - 1, i:], D[i - 1, i:]) / (m + D[i - 1, i - 1])
    D = D.triu()
    for i in range(1, m):
        B[i, :i] = (-D[:i, i] / (m + D.diagonal()[:i])) @ B[:i, :i]
    return D, B


def dynamic_multiply(
    G: Float[Tensor, "m d"], x: Float[Tensor, " d"], D: Float[Tensor, "m m"], B: Float[Tensor, "m m"], damping: float
) -> Float[Tensor, " d"]:
    """Algorithm 2: F⁻¹ x from D and B, in O(dm + m²).

    Corrected: each q is divided by m + D as soon as it is complete, inside the loop.
    """
    m = len(G)
    q = (G @ x) / damping
    q[0] /= m + D[0, 0]
    for i in range(1, m):
        q[i:] -= q[i - 1] * D[i - 1, i:]
        q[i] /= m + D[i, i]
    return x / damping - (q @ B) @ G


def static_setup(G: Float[Tensor, "*blocks m d"], damping: float) -> tuple[Tensor, Tensor]:
    """Algorithm 3: V [*blocks, m, d] and q [*blocks, m], in O(dm²); blocks side by side where there are any.

    Corrected: the first q is m + V_1 g, as the others are.
    """
    m = G.shape[-2]
    V = G.clone()
    q = torch.empty(G.shape[:-1], dtype=G.dtype, device=G.device)
    for i in range(m):
        g = G[..., i, :]
        before = V[..., :i, :]
        coefficients = (before @ g[..., None]) / q[..., :i, None]
        V[..., i, :] = g / damping - (coefficients.transpose(-1, -2) @ before)[..., 0, :]
        q[..., i] = m + (V[..., i, :] * g).sum(-1)
    return V, q


def static_multiply(
    V: Float[Tensor, "*blocks m d"], q: Float[Tensor, "*blocks m"], x: Float[Tensor, "*blocks d"], damping: float
) -> Float[Tensor, "*blocks d"]:
    """F⁻¹ x = x/λ − Vᵀ((V x)/q)."""
    coefficients = (V @ x[..., None]) / q[..., None]
    return x / damping - (V.transpose(-1, -2) @ coefficients)[..., 0]


def static_diagonal(
    V: Float[Tensor, "*blocks m d"], q: Float[Tensor, "*blocks m"], damping: float
) -> Float[Tensor, "*blocks d"]:
    """[F⁻¹]_ii = 1/λ − Σ_k V_ki²/q_k, a row of V at a time."""
    diagonal = torch.full_like(V[..., 0, :], 1 / damping)
    for k in range(V.shape[-2]):
        diagonal -= V[..., k, :].square() / q[..., k, None]
    return diagonal


def static_element(V: Float[Tensor, "m d"], q: Float[Tensor, " m"], i: int, j: int, damping: float) -> Tensor:
    """[F⁻¹]_ij = δ_ij/λ − Σ_k V_ki V_kj/q_k, in O(m)."""
    return (1 / damping if i == j else 0.0) - (V[:, i] * V[:, j] / q).sum()


def woodbury_recursion(G: Float[Tensor, "*blocks m d"], damping: float) -> Float[Tensor, "*blocks d d"]:
    """The dense F⁻¹ by m rank-one Sherman-Morrison steps, in O(d²m), as WoodFisher inverts each block."""
    m, d = G.shape[-2:]
    inverse = torch.eye(d, dtype=G.dtype, device=G.device).expand(*G.shape[:-2], d, d) / damping
    for i in range(m):
        g = G[..., i, :, None]
        v = inverse @ g
        inverse = inverse - v @ v.transpose(-1, -2) / (m + g.transpose(-1, -2) @ v)
    return inverse

"""What replacing one row does to the inverse of the m x m matrix S: formulas for float64 tensors and arrays alike.

Where m is small, the time of an update is that of calling some forty operations, and numpy's take a fifth of torch's.
"""

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, np.ndarray)


def replace(P: Array, k: int, others: Array, corner: Array, out: Array) -> None:
    """S⁻¹ [m, m] after row and column k of S were replaced: a symmetric rank-2 change, O(m²).

    Row k is taken out of P (P − q qᵀ/π, q = P e_k, π = q_k) and put back with its new entries (+ u uᵀ/σ). The two
    together are one product of an m x 2 by a 2 x m matrix; in torch it is added to P as it is made.

    Args:
        P: S⁻¹ before.
        k: the row.
        others: row k of the new S [m], but with a zero in the place of S_kk.
        corner: S_kk.
        out: where the new inverse goes; not P itself.
    """
    q, v = P[k], P @ others
    u = v - q * (v[k] / q[k])  # the inverse without row k, times the others; zero at k
    u[k] = -1
    sigma = corner - others @ u
    if isinstance(P, Tensor):
        torch.addmm(P, torch.stack((u, q), dim=1), torch.stack((u / sigma, q / -q[k])), out=out)
    else:
        left, right = np.concatenate((u, q)), np.concatenate((u / sigma, q / -q[k]))
        np.matmul(left.reshape(2, -1).T, right.reshape(2, -1), out=out)
        out += P


def examine(K: Array, P: Array, k: int, shift: float) -> tuple[Array, list[float]]:
    """How good P is as the inverse of S = shift · I + K, seen from its column k; one host sync.

    Returns:
        S⁻¹e_k, refined by its residual, and figures: K_kk; Σ S_ii c_i² of the correction c that this was, and of
        c = P e_k itself; and what `precision.sensitivity` asks for: max S_ii P_ii, Σ K_ii c_i² and c·Kc.
    """
    c, squares = P[k], K.diagonal()
    Kc, weights = K @ c, squares + shift
    residual = Kc + c * shift
    residual[k] -= 1
    correction = P @ residual
    terms = c * c
    figures = (
        K[k, k],
        weights @ (correction * correction),
        weights @ terms,
        (weights * P.diagonal()).max(),
        squares @ terms,
        c @ Kc,
    )
    found = torch.stack(figures).tolist() if isinstance(figures[0], Tensor) else [float(figure) for figure in figures]
    return c - correction, found

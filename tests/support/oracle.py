"""What is true: dense matrices in numpy's longdouble, where float64 itself would be wrong."""

import numpy as np
import torch


def wide(x):
    return x.double().cpu().numpy().astype(np.longdouble)


def fisher(rows, damping, weights=None, blocks=None):
    """F = λI + Σ c g gᵀ, with only the diagonal blocks [(start, stop), ...] kept."""
    G = wide(rows)
    m, d = G.shape
    c = np.full(m, 1 / np.longdouble(m)) if weights is None else wide(weights)
    F = (G.T * c) @ G
    if blocks is not None:
        kept = np.zeros((d, d), bool)
        for start, stop in blocks:
            kept[start:stop, start:stop] = True
        F = np.where(kept, F, 0)
    return F + np.longdouble(damping) * np.eye(d, dtype=np.longdouble)


def cholesky(F):
    L = np.zeros_like(F)
    for j in range(len(F)):
        L[j, j] = np.sqrt(F[j, j] - L[j, :j] @ L[j, :j])
        L[j + 1 :, j] = (F[j + 1 :, j] - L[j + 1 :, :j] @ L[j, :j]) / L[j, j]
    return L


def inverse(F):
    """F⁻¹ and log det F⁻¹."""
    L = cholesky(F)
    X = np.eye(len(F), dtype=F.dtype)
    for i in range(len(F)):
        X[i] = (X[i] - L[i, :i] @ X[:i]) / L[i, i]
    return X.T @ X, -2 * np.log(np.diag(L)).sum()


def error(answer, truth):
    """‖answer − truth‖ / ‖truth‖."""
    return float(np.linalg.norm((wide(answer) - truth).astype(float)) / np.linalg.norm(truth.astype(float)))


def worst(answer, truth):
    """The largest relative error of an entry."""
    return float(np.max(np.abs(wide(answer) - truth) / np.abs(truth)))


def condition(rows, damping):
    """The largest condition number that F can have: what float64 loses digits by."""
    return 1 + float(rows.double().square().sum()) / (len(rows) * damping)


def tolerance(rows, damping, dtype=torch.float32):
    """1e-4 in float32 and 1e-10 in float64, or as good as float64 can be where F is too ill-conditioned."""
    return max(1e-4 if dtype == torch.float32 else 1e-10, 1e-14 * condition(rows, damping))

"""When float32 products are good enough, judged from the m x m matrices, which are always in float64.

A product in float32 is wrong by about eps · ‖x‖/λ, and what is promised is relative to ‖F⁻¹x‖. The worst ratio of the
two is the condition number of F, at most ‖S‖/(mλ) with S = mλI + GGᵀ. So any product is safe while eps · ‖S‖/(mλ) is
small. The push-through step S⁻¹e_k, of a gradient that is in the window, subtracts nothing from x and needs less: its
errors grow with the `sensitivity` below, which sees how collinear the rows are and not how large.
"""

import math
import sys
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Precision = Literal["auto", "float32", "float64"]
PRECISIONS = ("auto", "float32", "float64")

EPS32 = 2.0**-24
# Chosen so that float32 stays below a relative error of 1e-4, the promise, with a margin of two.
PRODUCT_TOLERANCE = 5e-5
# The relative error of a float32 step is at most some 2.5e-6 times its sensitivity, measured over scales and kinds of
# rows; the sensitivity is 1 for orthogonal rows and 1e4 for rows that repeat one another to 1 %.
SENSITIVITY_LIMIT = 20.0


def check_precision(precision: str) -> None:
    """Raises ValueError unless it is one of the three."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, not {precision!r}")


def largest_eigenvalue(shift: float) -> float:
    """The largest of K up to which float32 products keep the promise."""
    return PRODUCT_TOLERANCE / EPS32 * shift


def float32_holds(K: Float[Tensor, "*blocks m m"], shift: float) -> bool:
    """Whether float32 products keep F⁻¹x to the promise for every x; False for matrices that are not finite."""
    limit = largest_eigenvalue(shift)
    # Two bounds of the largest eigenvalue: the first is cheaper, the second closer for rows of mixed directions.
    if bool(torch.linalg.matrix_norm(K).max() <= limit):
        return True
    return bool(K.abs().sum(-1).max() <= limit)


def sensitivity(collinearity: float, terms: float, total: float) -> float:
    """By how much relative errors of products with G can grow in the step Gᵀc, c = S⁻¹e_k; 1 for orthogonal rows.

    The geometric mean of two things: the collinearity, by which errors of K grow in c, and terms/total, by which the
    terms of Gᵀc cancel.

    Args:
        collinearity: max_i S_ii [S⁻¹]_ii.
        terms: Σ c_i² ‖g_i‖².
        total: ‖Gᵀc‖² = c·Kc.
    """
    # Terms that are all zero have nothing to cancel; a sum that rounding made negative has cancelled in full.
    cancellation = terms / max(total, sys.float_info.min) if terms > 0 else 1.0
    grown = collinearity * cancellation
    return math.sqrt(grown) if grown >= 0 else math.nan

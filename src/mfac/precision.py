"""Every decision about float32 and float64, made from the m x m matrices, which are always in float64.

A product in float32 has an error of about eps · ‖x‖/λ, and what is promised is relative to ‖F⁻¹x‖. The worst ratio of
the two is the condition number of F, at most ‖S‖/(mλ) with S = mλI + GGᵀ. So any product is safe while eps · ‖S‖/(mλ)
is small. The push-through step S⁻¹e_k, of a gradient in the window, subtracts nothing from x and needs less: its errors
grow with the `sensitivity` below, which depends on how collinear the rows are and not on how large they are.
"""

import math
import sys
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Precision = Literal["auto", "float32", "float64"]

EPS32, EPS64 = 2.0**-24, 2.0**-53
# Chosen so that float32 stays below a relative error of 1e-4, the promise, with a margin of two.
PRODUCT_TOLERANCE = 5e-5
LARGE_SQUARE = 1e36  # near the largest float32: products with such rows overflow in it, and coefficients underflow
# The relative error of a float32 step is at most some 2.5e-6 times its sensitivity, measured over scales and kinds of
# rows; the sensitivity is 1 for orthogonal rows and 1e4 for rows that repeat one another to 1 %.
SENSITIVITY_LIMIT = 20.0


def check_precision(precision: str) -> None:
    """Raises ValueError unless it is one of the three."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(map(repr, get_args(Precision)))}, not {precision!r}")


def check_dense(name: str, x: object) -> None:
    """Raises ValueError unless x is a floating-point tensor whose numbers are all in memory."""
    if not isinstance(x, Tensor):
        found, remedy = type(x).__name__, "torch.as_tensor"
    elif x.layout != torch.strided or x.is_nested or x.is_meta:
        found, remedy = "one on the meta device" if x.is_meta else f"a {x.layout} one", ".to_dense()"
    elif not x.is_floating_point():
        found, remedy = str(x.dtype), ".float()"
    else:
        return
    raise ValueError(f"{name} must be a dense floating-point tensor, not {found}; convert with {remedy}")


def product_dtype(precision: Precision, *involved: torch.dtype) -> torch.dtype:
    """The dtype of products with G: the one asked for, or float64 if a dtype involved is."""
    wide = torch.float64 in involved if precision == "auto" else precision == "float64"
    return torch.float64 if wide else torch.float32


def needs_float64(precision: Precision, dtype: torch.dtype, K: Float[Tensor, "*blocks m m"], shift: float) -> bool:
    """Whether products made in `dtype` so far must go over to float64, to keep F⁻¹x to the promise for every x."""
    if precision != "auto" or dtype == torch.float64:
        return False
    largest = PRODUCT_TOLERANCE / EPS32 * shift
    # Two bounds of the largest eigenvalue: the first is cheaper, the second closer for rows of mixed directions. Both
    # comparisons are False for matrices that are not finite.
    return not bool(torch.linalg.matrix_norm(K).max() <= largest) and not bool(K.abs().sum(-1).max() <= largest)


def is_sensitive(sensitivity: float, before: bool) -> bool:
    """Whether steps need float64; going back to float32 takes a sensitivity well below the limit."""
    return not sensitivity < (SENSITIVITY_LIMIT / 4 if before else SENSITIVITY_LIMIT)


def sensitivity(collinearity: float, terms: float, total: float) -> float:
    """How much relative errors of products with G can grow in the step Gᵀc, c = S⁻¹e_k; 1 for orthogonal rows.

    The geometric mean of the collinearity, max_i S_ii [S⁻¹]_ii, by which errors of K grow in c, and of terms/total, by
    which the terms of Gᵀc cancel: terms = Σ c_i² ‖g_i‖², total = ‖Gᵀc‖² = c·Kc. In float64 the error of a step is
    about eps · max(collinearity, √(terms/total)), measured; where that breaks the promise, it is infinite.
    """
    # Terms that are all zero have nothing to cancel; a sum that rounding made negative has cancelled in full.
    cancellation = terms / max(total, sys.float_info.min) if terms > 0 else 1.0
    if not (collinearity >= 0 and EPS64 * max(collinearity, math.sqrt(cancellation)) < PRODUCT_TOLERANCE):
        return math.inf  # also where rounding has left nothing but NaN
    return math.sqrt(collinearity * cancellation)

"""When float32 products are good enough, judged from the m x m matrices, which are always in float64.

A product in float32 is wrong by about eps · ‖x‖/λ, and what is promised is relative to ‖F⁻¹x‖. The worst ratio of the
two is the condition number of F, at most ‖S‖/(mλ) with S = mλI + GGᵀ. So any product is safe while eps · ‖S‖/(mλ) is
small. The push-through step S⁻¹e_k, of a gradient that is in the window, subtracts nothing from x and needs less: its
errors grow with the collinearity of the rows and not with their scale.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Precision = Literal["auto", "float32", "float64"]
PRECISIONS = ("auto", "float32", "float64")

EPS32 = 2.0**-24
# Chosen so that float32 stays below a relative error of 1e-4, the promise, with a margin of two.
PRODUCT_TOLERANCE = 5e-5
# The collinearity max_k S_kk [S⁻¹]_kk is 1 for orthogonal rows and 1e4 for rows that repeat one another to 1 %; the
# relative error of a float32 step is about 2.4e-6 times it, measured over scales and kinds of rows.
COLLINEARITY_LIMIT = 20.0


def check_precision(precision: str) -> None:
    """Raises ValueError unless it is one of the three."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, not {precision!r}")


def float32_holds(K: Float[Tensor, "*blocks m m"], shift: float) -> bool:
    """Whether float32 products keep F⁻¹x to the promise for every x; False for matrices that are not finite."""
    norm = K.abs().sum(-1).max()  # bounds the largest eigenvalue
    return bool(EPS32 * norm <= PRODUCT_TOLERANCE * shift)


def collinearity(S_diagonal: Float[Tensor, " m"], inverse_diagonal: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    """max_k S_kk [S⁻¹]_kk: by how much the other rows explain row k, at worst; at least 1."""
    return (S_diagonal * inverse_diagonal).max()

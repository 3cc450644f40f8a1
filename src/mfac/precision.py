"""Every decision about float32 and float64: what is promised, how an answer is judged, and what is then done.

The promise is a relative error of 1e-4. With "auto" an answer is made in float32 first and its error estimated; what
may not keep the promise is made again in float64: columns of a product, entries of a diagonal, the Gram matrix of a
block. Where float64 does not keep it either, LinAlgError is raised. docs/algorithm.md derives the estimates. D is the
diagonal of K, and κ = ‖D^½S⁻¹D^½‖ is by how much errors of K, relative to the norms of the rows, can grow: it depends
on how collinear the rows are and hardly on how large they are. So does the `sensitivity` of a step.
"""

import math
import sys
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac import woodbury

Precision = Literal["auto", "float32", "float64"]
Blocks = slice | Int[Tensor, " k"]

EPS32, EPS64 = 2.0**-24, 2.0**-53
PROMISE = 1e-4
PRODUCT_TOLERANCE = 5e-5  # what is accepted of float32: the promise with a margin of two
LARGE_SQUARE = 1e36  # near the largest float32: products with such rows overflow in it, and coefficients underflow
# Errors of a sum of products, in units of its terms: some 3 to 8 were found in searches for the worst rows.
ROUNDING = {torch.float32: 8 * EPS32, torch.float64: 4 * EPS64}
FEW_ROWS = 32  # up to here the Gram matrix is in float64: it costs little, and too few rows to measure its error on
SHORT_BLOCK = 4  # times m: the Gram matrix of so few weights takes no longer than its factors, in float64
SAMPLE = 16  # rows at least, and one of so many, whose products are also made in float64, to measure K's error
NEGLIGIBLE = 1e-9  # an error of K, after it has grown, that no answer has to be judged by
# The relative error of a float32 step is at most some 2.5e-6 times its sensitivity, measured over scales and kinds of
# rows; the sensitivity is 1 for orthogonal rows and 1e4 for rows that repeat one another to 1 %.
SENSITIVITY_LIMIT = 20.0
SCALES = (1e-24, 1e24)  # of mλ and of ‖x‖²: beyond these, numbers that matter could leave float32's range


class Condition(NamedTuple):
    """What the error of an answer depends on, for each block."""

    gram: Float[Tensor, " blocks"]  # the error of K, relative to the norms of its rows
    squares: Float[Tensor, "blocks m"]  # D
    inverse: Float[Tensor, "blocks m"]  # the diagonal of S⁻¹
    growth: Float[Tensor, " blocks"]  # κ, or a bound of it where that is enough

    def closer(self, P: Float[Tensor, "blocks m m"], shift: float) -> "Condition":
        """With S⁻¹KS⁻¹ in the place of P = S⁻¹, which bounds it: for products, after which Gᵀ follows."""
        inner = (P.diagonal(dim1=1, dim2=2) - shift * P.square().sum(1)).clamp_min(0)
        trace = (self.squares * inner).sum(1)
        return self._replace(inverse=inner, growth=torch.where(self.grown < math.inf, trace, math.inf))

    @property
    def grown(self) -> Float[Tensor, " blocks"]:
        """The error of K after it went through S⁻¹; infinite where that is too large for the estimates to hold."""
        error = self.gram * self.growth
        return torch.where(error < 0.05, error, math.inf)


class Factors:
    """K and L Lᵀ = S = shift · I + K of some blocks, all in float64, and how good they are.

    L and K share a matrix, which is column by column, as LAPACK writes and reads it.
    """

    def __init__(self, count: int, m: int, shift: float, device: torch.device):
        self.shift = shift
        self.L = torch.empty(count, m, m, dtype=torch.float64, device=device).transpose(1, 2)
        shapes = (count,), (count, m), (count, m), (count,)
        self.condition = Condition(*(torch.full(s, math.nan, dtype=torch.float64, device=device) for s in shapes))
        self._settled = torch.zeros(count, dtype=torch.bool, device="cpu")
        self._made: tuple[slice, Tensor] | None = None  # L⁻¹ of these blocks, for the diagonal that may follow

    def accept(self, blocks: Blocks, K: Float[Tensor, "k m m"], error: float | Tensor) -> bool:
        """Takes over K, which is overwritten, and its error, unless it is not finite."""
        squares = K.diagonal(dim1=1, dim2=2).clone()
        if not bool(torch.isfinite(squares).all()):
            return False
        self.L[blocks] = woodbury.pack(woodbury.factor(K, self.shift, overwrite=True), K)
        self.condition.squares[blocks], self.condition.gram[blocks] = squares, error
        self._settled[blocks], self._made = False, None
        return True

    def gram(self, blocks: Blocks) -> Float[Tensor, "k m m"]:
        return woodbury.unpack(self.L[blocks], self.condition.squares[blocks])

    def known(self, blocks: Blocks) -> Condition:
        """What answers of the blocks are judged by."""
        if not bool(self._settled[blocks].all()):
            Linv, squares = woodbury.inverse_factor(self.L[blocks]), self.condition.squares[blocks]
            inverse = torch.linalg.vector_norm(Linv, dim=1).square_()
            growth = (squares * inverse).sum(1)  # the trace, which bounds the norm: often enough, and nearly free
            if not bool((self.condition.gram[blocks] * growth <= NEGLIGIBLE).all()):
                growth = woodbury.growth(Linv, squares)
            self.condition.growth[blocks], self.condition.inverse[blocks] = growth, inverse
            self._settled[blocks] = True
            self._made = (blocks, Linv) if isinstance(blocks, slice) else None
        return Condition(*(part[blocks] for part in self.condition))

    def damped(self, blocks: Blocks) -> Float[Tensor, "k m m"]:
        """S."""
        S = self.gram(blocks)
        S.diagonal(dim1=1, dim2=2).add_(self.shift)
        return S

    def inverse_factor(self, blocks: slice) -> Float[Tensor, "k m m"]:
        """L⁻¹; what was made for the condition is given away."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] == blocks else woodbury.inverse_factor(self.L[blocks])

    def rough(self, blocks: Blocks) -> Bool[Tensor, " k"]:
        """For which blocks K is not in float64."""
        return self.condition.gram[blocks] > gram_error(self.L.shape[1])

    def diagnostics(self) -> dict[str, int | float]:
        """How many blocks have K in float64, and the largest relative error that a K makes."""
        rough, worst = self.rough(slice(None)), self.known(slice(None)).grown.max()
        return {"float64_blocks": int((~rough).sum()), "gram_error": float(worst)}


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
    elif not x.is_floating_point() or x.itemsize == 1:
        found, remedy = str(x.dtype), ".float()"
    else:
        return
    raise ValueError(f"{name} must be a dense floating-point tensor, not {found}; convert with {remedy}")


def product_dtype(precision: Precision, *involved: torch.dtype) -> torch.dtype:
    """The dtype of products with G: the one asked for, or float64 if a dtype involved is."""
    wide = torch.float64 in involved if precision == "auto" else precision == "float64"
    return torch.float64 if wide else torch.float32


def first_dtype(precision: Precision, stored: torch.dtype, shift: float) -> torch.dtype:
    """The dtype that is tried first for blocks with this mλ."""
    outside = precision == "auto" and not SCALES[0] < shift < SCALES[1]
    return torch.float64 if outside else product_dtype(precision, stored)


def gram_dtype(precision: Precision, dtype: torch.dtype, m: int, length: int | None = None) -> torch.dtype:
    """The dtype that is tried first for a Gram matrix of m rows; of each of several blocks, with rows of `length`."""
    cheap = m <= FEW_ROWS or (length is not None and length <= SHORT_BLOCK * m)
    return torch.float64 if precision == "auto" and cheap else dtype


def limit(dtype: torch.dtype) -> float:
    """The error that is accepted of an answer in this dtype."""
    return PRODUCT_TOLERANCE if dtype == torch.float32 else PROMISE


def needs_more(precision: Precision, dtype: torch.dtype, K: Float[Tensor, "*blocks m m"], shift: float) -> bool:
    """Whether `dtype` does not keep the promise of F⁻¹x for every x; for rows that will not be there to go over again.

    Never with "float32", which was asked for.
    """
    if precision == "float32":
        return False
    largest = limit(dtype) / (EPS32 if dtype == torch.float32 else EPS64) * shift
    return not bool(K.abs().sum(-1).max() <= largest)  # it bounds the largest eigenvalue


def sample(m: int) -> slice:
    """The rows on which the error of K is measured."""
    return slice(0, m, max(1, min(m // SAMPLE, SAMPLE)))


def gram_error(m: int, dtype: torch.dtype = torch.float64) -> float:
    """A bound of ‖D^-½ (K̃ − K) D^-½‖, and of what a Cholesky factorization adds to it; in float32 an estimate."""
    return 2 * math.sqrt(m) * (EPS64 if dtype == torch.float64 else EPS32)


def measured_error(
    K: Float[Tensor, "blocks m m"], exact: Float[Tensor, "blocks s s"], rows: slice
) -> Float[Tensor, " blocks"]:
    """‖D^-½ (K̃ − K) D^-½‖, by that of a sample's rows times m/s, as if all errors had a common cause; twice that.

    Independent errors grow by √(m/s) only. Between different rows ‖E‖ is taken as ‖E⁴‖_F^¼, which is little more.
    """
    norms = exact.diagonal(dim1=1, dim2=2).sqrt()
    scales = (norms[:, :, None] * norms[:, None]).clamp_min(sys.float_info.min)
    error = (K[:, rows, rows] - exact) / scales
    m, s = K.shape[1], exact.shape[1]
    own = error.diagonal(dim1=1, dim2=2)
    among = torch.linalg.matrix_norm(torch.linalg.matrix_power(error - torch.diag_embed(own), 4)) ** 0.25
    return 2 * (own.abs().amax(1) + among * m / s).clamp_min(math.sqrt(m) * EPS32)


def primal_error(condition: Condition, shift: float) -> Float[Tensor, " blocks"]:
    """Of F⁻¹x for every x, by K in F = λI + K."""
    return (condition.grown * condition.gram * condition.squares.amax(1) / shift).sqrt()


def diagonal_error(
    dtype: torch.dtype, condition: Condition, whitened: Tensor, spread: Tensor, least: Float[Tensor, "blocks n"]
) -> Float[Tensor, "blocks n"]:
    """Of [F⁻¹]_ii = (1 − ‖W_i‖²)/λ by W in `dtype` and by K.

    `whitened` is ‖W_i‖², `spread` Σ_k [S⁻¹]_kk G_ki², and `least` λ/F_ii, the least that 1 − ‖W_i‖² can be.
    """
    rounding = ROUNDING[dtype] * (whitened + (whitened * spread).sqrt())
    return (rounding + _times(condition.grown, whitened)) / (1 - whitened).maximum(least)


def product_errors(
    dtype: torch.dtype, condition: Condition, squares: Tensor, terms: Tensor, rest: Float[Tensor, "blocks *k"]
) -> tuple[Float[Tensor, "blocks *k"], Float[Tensor, "blocks *k"]]:
    """Of λF⁻¹x = x − Gᵀa, a = S⁻¹Gx: by products in `dtype`, and by K.

    `squares` is ‖x‖², `terms` Σ D_k a_k², and `rest` ‖x − Gᵀa‖², or its estimate before Gᵀa is made.
    """
    spread = 1 + (condition.squares * condition.inverse).sum(1).sqrt()
    rounding = ROUNDING[dtype] * (_times(spread, squares.sqrt()) + terms.sqrt()) / rest.sqrt()
    by_gram = _times((condition.grown * condition.gram).sqrt(), terms.sqrt()) / rest.sqrt()
    inside = (squares > SCALES[0]) & (squares < SCALES[1])
    rounding = rounding if dtype == torch.float64 else torch.where(inside, rounding, math.inf)
    return torch.where(squares == 0, 0.0, rounding), torch.where(squares == 0, 0.0, by_gram)


def check_products(
    condition: Condition, L: Tensor, shift: float, squares: Tensor, terms: Tensor, rest: Float[Tensor, "blocks *k"]
) -> None:
    """Raises LinAlgError unless products in float64 keep the promise; a closer estimate is made only if need be."""
    error = torch.maximum(*product_errors(torch.float64, condition, squares, terms, rest))
    if not bool((error <= PROMISE).all()):
        closer = condition.closer(torch.cholesky_inverse(L), shift)
        error = torch.maximum(*product_errors(torch.float64, closer, squares, terms, rest))
        check_promise(error, condition.squares, shift)


def form_error(
    condition: Condition, squares: Tensor, terms: Tensor, rest: Float[Tensor, "blocks k"]
) -> Float[Tensor, "blocks k"]:
    """Of λxᵀF⁻¹x = `rest` = ‖x‖² − ‖L⁻¹Gx‖² by G x in float64 and by K; `terms` is Σ D_k a_k², a = S⁻¹Gx."""
    rounding = ROUNDING[torch.float64] * (squares + (squares * terms).sqrt())
    error = (rounding + _times(condition.gram + gram_error(condition.squares.shape[1]), terms)) / rest
    return torch.where(squares == 0, 0.0, torch.where(condition.grown[:, None] < math.inf, error, math.inf))


def removal_error(condition: Condition, terms: Tensor, moved: Tensor) -> Float[Tensor, " blocks"]:
    """Of the joint removal's δ with ‖δ‖² = `moved`, by K_R of S_R; `terms` is Σ D_k a_k²."""
    return (condition.grown * condition.gram * terms / moved.clamp_min(sys.float_info.min)).sqrt()


def _times(a: Float[Tensor, " blocks"], b: Float[Tensor, "blocks *k"]) -> Float[Tensor, "blocks *k"]:
    return a.view(-1, *[1] * (b.ndim - 1)) * b


def check_promise(error: Float[Tensor, "..."], squares: Float[Tensor, "..."], shift: float) -> None:
    """Raises LinAlgError unless every error of an answer in float64 keeps the promise."""
    if not bool((error <= PROMISE).all()):
        raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
            f"the answer would have fewer than four digits in float64: the damping adds {shift:.3g} to squared "
            f"gradients of up to {float(squares.max()):.3g} that nearly repeat one another, or cancels in what was "
            "asked; raise the damping, or scale the gradients down"
        )


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

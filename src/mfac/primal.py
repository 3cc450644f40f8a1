"""Blocks of no more weights than there are gradients: worked in the primal, where the matrices are B x B."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products, woodbury
from mfac.blocks import Run
from mfac.pages import Pages
from mfac.precision import float32_holds


class PrimalBlocks:
    """F_b⁻¹ for the blocks of one run, through the Cholesky factors of F_b = λI + G_bᵀ C G_b; G itself is not kept.

    Args:
        run: where the blocks lie.
        fisher: their undamped Fisher matrices G_bᵀ C G_b; its memory is used.
        damping: λ.
    """

    def __init__(self, run: Run, fisher: Float[Tensor, "blocks b b"], damping: float):
        self.run = run
        self._damping = damping
        self._L = woodbury.factor(fisher, damping)

    @staticmethod
    def accumulate(
        run: Run,
        pages: Pages,
        weights: Float[Tensor, " m"],
        damping: float,
        columns: int,
        dtype: torch.dtype,
        auto: bool,
    ) -> Float[Tensor, "blocks b b"]:
        """G_bᵀ C G_b of every block, each piece in float32 where that is safe (`auto`) or in `dtype`."""
        fisher = torch.empty(run.count, run.length, run.length, dtype=torch.float64, device=pages.device)
        for piece, rows in pages.stream(run.pieces(max(columns, run.length))):
            G = rows.transpose(1, 2)
            fisher[piece.blocks] = _weighted_gram(G, weights, dtype)
            if auto and dtype == torch.float32 and not float32_holds(fisher[piece.blocks], damping):
                fisher[piece.blocks] = _weighted_gram(G, weights, torch.float64)
        return fisher

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F⁻¹ x."""
        return woodbury.solve(self._L, self._split(x.double())).flatten(0, 1).to(x.dtype)

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x = ‖L⁻¹x‖²."""
        return woodbury.half_solve(self._L, self._split(x.double())).square().sum((0, 1))

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii = Σ_k [L⁻¹]_ki²: nothing is subtracted."""
        squares = woodbury.inverse_factor(self._L).square_().sum(1)
        least = self._L.square().sum(2).reciprocal()
        return squares.maximum(least).clamp_max(1 / self._damping).flatten()

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""
        length = self.run.length
        out = torch.zeros(len(rows), dtype=torch.float64, device=self._L.device)
        same = (rows // length == columns // length).nonzero()[:, 0]
        for chosen in same.split(max(1, products.TILE // length**2)):
            units = torch.zeros(len(chosen), length, 2, dtype=torch.float64, device=out.device)
            each = torch.arange(len(chosen), device=out.device)
            units[each, rows[chosen] % length, 0] = 1
            units[each, columns[chosen] % length, 1] = 1
            out[chosen] = woodbury.half_solve(self._L[rows[chosen] // length], units).prod(-1).sum(-1)
        return out

    def logdet(self) -> Float[Tensor, ""]:
        """log det F⁻¹."""
        return -woodbury.log_det(self._L).sum()

    def refactor(self, damping: float) -> None:
        """Makes it right for another damping, from the factors alone."""
        fisher = self._L @ self._L.transpose(1, 2)
        fisher.diagonal(dim1=1, dim2=2).sub_(self._damping)
        self._L = woodbury.factor(fisher, damping)
        self._damping = damping

    def _split(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "blocks b *k"]:
        return x.unflatten(0, (self.run.count, self.run.length))


def _weighted_gram(
    G: Float[Tensor, "blocks b m"], weights: Float[Tensor, " m"], dtype: torch.dtype
) -> Float[Tensor, "blocks b b"]:
    """G_bᵀ C G_b; equal weights, the usual case, are taken out of the product."""
    if bool((weights == weights[0]).all()):
        return products.gram(G, dtype) * weights[0]
    return products.gram(G.to(dtype) * weights.sqrt().to(dtype), dtype)

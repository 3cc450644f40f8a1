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
        factors: L of every block.
        damping: λ.
    """

    def __init__(self, run: Run, factors: Float[Tensor, "blocks b b"], damping: float):
        self.run = run
        self._damping = damping
        self._L = factors

    @classmethod
    def from_sums(cls, run: Run, fisher: Float[Tensor, "blocks b b"], damping: float) -> "PrimalBlocks":
        """From the undamped Fisher matrices G_bᵀ C G_b."""
        return cls(run, woodbury.factor(fisher, damping), damping)

    @classmethod
    def from_rows(
        cls,
        run: Run,
        pages: Pages,
        weights: Float[Tensor, " m"] | None,
        damping: float,
        columns: int,
        dtype: torch.dtype,
        auto: bool,
    ) -> "PrimalBlocks":
        """From G, in one pass; each piece in `dtype`, or (`auto`) in float64 where float32 is not safe."""
        L = torch.empty(run.count, run.length, run.length, dtype=torch.float64, device=pages.device).transpose(1, 2)
        for piece, rows in pages.stream(run.pieces(max(columns, run.length))):
            fisher = _weighted_gram(rows.transpose(1, 2), weights, dtype)
            if auto and dtype == torch.float32 and not float32_holds(fisher, damping):
                fisher = _weighted_gram(rows.transpose(1, 2), weights, torch.float64)
            if not bool(torch.isfinite(fisher.diagonal(dim1=1, dim2=2)).all()):
                pages.raise_for_rows()
            L[piece.blocks] = woodbury.factor(fisher, damping, overwrite=True)
        return cls(run, L, damping)

    @property
    def device(self) -> torch.device:
        """Where vectors are expected."""
        return self._L.device

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F⁻¹ x."""
        return woodbury.solve(self._L, self._split(x.double())).flatten(0, 1).to(x.dtype)

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x = ‖L⁻¹x‖²."""
        return woodbury.half_solve(self._L, self._split(x.double())).square().sum((0, 1))

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii = Σ_k [L⁻¹]_ki²: nothing is subtracted."""
        parts = []
        for L in self._L.split(max(1, products.TILE // self.run.length**2)):  # few enough to stay in cache
            squares = woodbury.inverse_factor(L).square_().sum(1)
            least = L.square().sum(2).reciprocal()
            parts.append(squares.maximum(least).clamp_max(1 / self._damping).flatten())
        return torch.cat(parts)

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
    G: Float[Tensor, "blocks b m"], weights: Float[Tensor, " m"] | None, dtype: torch.dtype
) -> Float[Tensor, "blocks b b"]:
    """G_bᵀ C G_b."""
    if weights is None:
        return products.gram(G, dtype).div_(G.shape[2])
    return products.gram(G.to(dtype) * weights.sqrt().to(dtype), dtype)

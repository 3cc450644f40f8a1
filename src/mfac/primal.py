"""Blocks of at most as many weights as there are gradients: worked in the primal, where the matrices are B x B."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mfac import products, woodbury
from mfac.pages import BLOCK_PIECE, BlockRun, Pages
from mfac.precision import Precision, needs_float64, product_dtype

Couple = Callable[[Float[Tensor, "blocks b"]], Float[Tensor, "blocks b"]]


class PrimalBlocks:
    """F_b⁻¹ for the blocks of one run, from the Cholesky factors of F_b = λI + G_bᵀ C G_b; G itself is not kept."""

    def __init__(self, run: BlockRun, factors: Float[Tensor, "blocks b b"], damping: float):
        self.run = run
        self._damping = damping
        self._L = factors
        self._step = max(1, BLOCK_PIECE // run.length**2)  # blocks that stay in cache

    @classmethod
    def from_rows(
        cls,
        run: BlockRun,
        pages: Pages,
        damping: float,
        precision: Precision = "auto",
        weights: Float[Tensor, " m"] | None = None,
    ) -> "PrimalBlocks":
        """From G, in one pass; with "auto", in float64 for those pieces where float32 is not safe."""
        L = torch.empty(run.count, run.length, run.length, dtype=torch.float64, device=pages.device).transpose(1, 2)
        dtype = product_dtype(precision, pages.dtype)
        for piece, rows in pages.stream(run.pieces(max(pages.columns_at_once(run), run.length))):
            fisher = _weighted_gram(rows.transpose(1, 2), weights, dtype)
            if needs_float64(precision, dtype, fisher, damping):
                fisher = _weighted_gram(rows.transpose(1, 2), weights, torch.float64)
            if not bool(torch.isfinite(fisher.diagonal(dim1=1, dim2=2)).all()):
                pages.raise_for_rows()
            L[piece.blocks] = woodbury.factor(fisher, damping, overwrite=True)
        return cls(run, L, damping)

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        return woodbury.solve(self._L, self._split(x.double())).flatten(0, 1).to(x.dtype)

    def forward(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F x = L Lᵀ x."""
        columns = self._split(x.double().reshape(len(x), -1))
        return (self._L @ (self._L.transpose(1, 2) @ columns)).to(x.dtype).view_as(x)

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x = ‖L⁻¹x‖²."""
        return woodbury.half_solve(self._L, self._split(x.double())).square().sum((0, 1))

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii = Σ_k [L⁻¹]_ki²: nothing is subtracted."""
        parts = []
        for L in self._L.split(self._step):
            squares = woodbury.inverse_factor(L).square_().sum(1)
            least = L.square().sum(2).reciprocal()
            parts.append(squares.maximum(least).clamp_max(1 / self._damping).flatten())
        return torch.cat(parts)

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""

        def whitened(blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k b q"]:
            units = self._L.new_zeros(len(blocks), self.run.length, places.shape[1])
            return woodbury.half_solve(self._L[blocks], units.scatter_(1, places[:, None], 1.0))

        return products.pair_products(rows, columns, self.run.length, self._step, whitened)

    def logdet(self) -> Float[Tensor, ""]:
        return -woodbury.log_det(self._L).sum()

    def refactor(self, damping: float) -> None:
        """Changes the damping, from the factors alone."""
        fisher = self._L @ self._L.transpose(1, 2)
        fisher.diagonal(dim1=1, dim2=2).sub_(self._damping)
        self._L = woodbury.factor(fisher, damping, overwrite=True)
        self._damping = damping

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """δ = −θ on the removed weights and F_RR⁻¹ F_RQ θ_Q on the kept ones, and ½ δᵀFδ."""
        blocks = self._L.split(self._step), self._split(theta).split(self._step), self._split(removed).split(self._step)
        results = [woodbury.primal_removal(L @ L.transpose(1, 2), t, r) for L, t, r in zip(*blocks, strict=True)]
        return torch.cat([delta.flatten() for delta, _ in results]), torch.cat([cost for _, cost in results]).sum()

    def coupled_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"], couple: Couple
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """The joint removal by F + C, where couple(x) is C x: what blocks [blocks, b] have to do with one another.

        Conjugate gradients over the kept weights, preconditioned by the removal of each block for itself.
        """
        F, kept = self._L @ self._L.transpose(1, 2), ~self._split(removed)
        gone = torch.where(kept, 0.0, self._split(theta))

        def apply(x: Float[Tensor, "blocks b"]) -> Float[Tensor, "blocks b"]:
            return torch.einsum("kij,kj->ki", F, x) + couple(x)

        M = woodbury.kept_factor(F, ~kept)
        right = torch.where(kept, apply(gone), 0.0)
        x = woodbury.conjugate_gradients(
            lambda x: torch.where(kept, apply(x), 0.0), lambda r: torch.where(kept, woodbury.solve(M, r), 0.0), right
        )
        delta = x - gone
        return delta.flatten(), (delta * apply(delta)).sum() / 2

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ = ½ ‖Lᵀδ‖²."""
        return torch.einsum("bij,bi->bj", self._L, self._split(delta)).square().sum() / 2

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        """F⁻¹ of the blocks, dense, some blocks at a time."""
        for first in range(0, self.run.count, self._step):
            blocks = slice(first, min(first + self._step, self.run.count))
            yield blocks, torch.cholesky_inverse(self._L[blocks])

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of `count` groups, `ids` being each weight's group; summed over a group's blocks."""
        out = theta.new_zeros(count)
        for blocks, inverse in self.inverses():
            weights, groups = self._split(theta)[blocks], self._split(ids)[blocks]
            position = torch.arange(groups.numel(), device=ids.device)
            keys, table, _, _ = products.grouped(position // self.run.length * count + groups.flatten(), position)
            for key, chosen in zip(keys.split(self._step), table.split(self._step), strict=True):
                absent, places = chosen < 0, chosen.clamp_min(0) % self.run.length
                inner = inverse[(key // count)[:, None, None], places[:, :, None], places[:, None, :]]
                inner = inner.masked_fill(absent[:, :, None] | absent[:, None, :], 0.0)
                inner.diagonal(dim1=1, dim2=2).add_(absent.double())
                theta_Q = weights.flatten()[chosen.clamp_min(0)].masked_fill(absent, 0.0)
                x = woodbury.solve(woodbury.factor(inner, 0.0, overwrite=True), theta_Q)
                out.index_add_(0, key % count, 0.5 * (theta_Q * x).sum(-1))
        return out

    def _split(self, x: Shaped[Tensor, "n *k"]) -> Shaped[Tensor, "blocks b *k"]:
        return x.unflatten(0, (self.run.count, self.run.length))


def _weighted_gram(
    G: Float[Tensor, "blocks b m"], weights: Float[Tensor, " m"] | None, dtype: torch.dtype
) -> Float[Tensor, "blocks b b"]:
    """G_bᵀ C G_b."""
    if weights is None:
        return products.gram(G, dtype).div_(G.shape[2])
    return products.gram(G.to(dtype) * weights.sqrt().to(dtype), dtype)

"""Blocks of at most as many weights as there are gradients: worked in the primal, where the matrices are B x B."""

from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mfac import precision as judge
from mfac import products, woodbury
from mfac.pages import BLOCK_PIECE, BlockRun, Pages
from mfac.precision import Factors, Precision

Couple = Callable[[Float[Tensor, "blocks b"]], Float[Tensor, "blocks b"]]


class PrimalBlocks:
    """F_b⁻¹ for the blocks of one run, from the Cholesky factors of F_b = λI + K_b, K_b = G_bᵀ C G_b.

    G is read once. K is made in float64 unless float32 is asked for: gradients rarely allow less for every vector, and
    trying costs more than it saves.
    """

    def __init__(
        self, run: BlockRun, damping: float, device: torch.device, precision: Precision = "float64",
        pages: Pages | None = None, weights: Float[Tensor, " m"] | None = None,
    ):  # fmt: skip
        self.run = run
        self._dtype = judge.product_dtype(precision, torch.float64)
        self._factors = Factors(run.count, run.length, damping, device)
        if pages is not None:
            self._build(pages, weights)

    @classmethod
    def from_sums(cls, run: BlockRun, K: Float[Tensor, "blocks b b"], damping: float) -> "PrimalBlocks":
        """From K, which was made in float64 and is overwritten."""
        made = cls(run, damping, K.device)
        if not made._accept(slice(0, run.count), K):
            raise ValueError("the sums of products of gradients are not finite; scale the loss down")
        return made

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        return woodbury.solve(self._factors.L, self._split(x.double())).flatten(0, 1).to(x.dtype)

    def forward(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F x."""
        columns = self._split(x.double().reshape(len(x), -1))
        return (self._factors.damped(slice(None)) @ columns).to(x.dtype).view_as(x)

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x = ‖L⁻¹x‖²."""
        return woodbury.half_solve(self._factors.L, self._split(x.double())).square().sum((0, 1))

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii = Σ_k [L⁻¹]_ki²: nothing is subtracted."""
        known = self._factors.known(slice(None))
        least = (known.squares + self._factors.shift).reciprocal()
        return known.inverse.maximum(least).clamp_max(1 / self._factors.shift).flatten()

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""

        def whitened(blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k b q"]:
            units = self._factors.L.new_zeros(len(blocks), self.run.length, places.shape[1])
            return woodbury.half_solve(self._factors.L[blocks], units.scatter_(1, places[:, None], 1.0))

        step = max(1, BLOCK_PIECE // self.run.length**2)
        return products.pair_products(rows, columns, self.run.length, step, whitened)

    def logdet(self) -> Float[Tensor, ""]:
        return -woodbury.log_det(self._factors.L).sum()

    def diagnostics(self) -> dict[str, int | float]:
        """Blocks with K in float64, and the error that K makes at most."""
        return {"products": 0, "entries": 0} | self._factors.diagnostics()

    def refactor(self, damping: float) -> None:
        """Changes the damping, from K alone."""
        before, self._factors = self._factors, Factors(self.run.count, self.run.length, damping, self._factors.L.device)
        try:
            for blocks in self._parts():
                self._accept(blocks, before.gram(blocks))
        except Exception:
            self._factors = before
            raise

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """δ = −θ on the removed weights and F_RR⁻¹ F_RQ θ_Q on the kept ones, and ½ δᵀFδ."""
        weights, gone, F = self._split(theta), self._split(removed), self._factors.damped
        results = [woodbury.primal_removal(F(some), weights[some], gone[some]) for some in self._parts()]
        return torch.cat([delta.flatten() for delta, _ in results]), torch.cat([cost for _, cost in results]).sum()

    def coupled_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"], couple: Couple
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """The joint removal by F + C, where couple(x) is C x: what blocks [blocks, b] have to do with one another.

        By conjugate gradients, preconditioned by the removal of each block for itself.
        """
        F = self._factors.damped(slice(None))
        M = woodbury.kept_factor(F, self._split(removed))

        def apply(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            X = self._split(x)
            return (torch.einsum("kij,kj->ki", F, X) + couple(X)).flatten()

        def precondition(r: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            half = woodbury.half_solve(M, self._split(r))[..., None]  # unlike torch.cholesky_solve, it does not copy M
            return torch.linalg.solve_triangular(M.mT, half, upper=True).flatten()

        return woodbury.iterated_removal(apply, precondition, theta, removed)

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        return (delta @ self.forward(delta)) / 2

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        """F⁻¹ of the blocks, dense, some blocks at a time."""
        for blocks in self._parts():
            yield blocks, torch.cholesky_inverse(self._factors.L[blocks])

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        return group_costs(self.run, self.inverses(), theta, ids, count)

    def _build(self, pages: Pages, weights: Float[Tensor, " m"] | None) -> None:
        scale = None if weights is None else (weights * pages.shape[0]).sqrt().to(self._dtype)
        columns = max(pages.columns_at_once(self.run), self.run.length)
        held = self._factors.L.new_empty(0, dtype=self._dtype)  # new memory for each piece would take longer than K
        for piece, rows in pages.stream(self.run.pieces(columns)):
            held = held if held.numel() >= rows.numel() else held.new_empty(rows.numel())
            G = held[: rows.numel()].view(rows.shape).copy_(rows).transpose(1, 2)
            K = products.gram(G if scale is None else G.mul_(scale), self._dtype).div_(pages.shape[0])
            if not self._accept(piece.blocks, K):
                pages.raise_for_rows()

    def _accept(self, blocks: slice, K: Float[Tensor, "k b b"]) -> bool:
        """Takes over K, which is overwritten, unless it is not finite."""
        if not self._factors.accept(blocks, K, judge.gram_error(self.run.length, self._dtype)):
            return False
        if self._dtype == torch.float64:
            error = judge.primal_error(self._factors.known(blocks), self._factors.shift)
            judge.check_promise(error, self._factors.condition.squares, self._factors.shift)
        return True

    def _parts(self) -> list[slice]:
        """Blocks that stay in cache."""
        return products.spans(self.run.count, max(1, BLOCK_PIECE // self.run.length**2))

    def _split(self, x: Shaped[Tensor, "n *k"]) -> Shaped[Tensor, "blocks b *k"]:
        return x.unflatten(0, (self.run.count, self.run.length))


def group_costs(
    run: BlockRun, inverses: Iterable[tuple[slice, Float[Tensor, "blocks b b"]]], theta: Float[Tensor, " n"],
    ids: Int[Tensor, " n"], count: int,
) -> Float[Tensor, " count"]:  # fmt: skip
    """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of `count` groups, `ids` being each weight's group; summed over a group's blocks."""
    out, b = theta.new_zeros(count), run.length
    for blocks, inverse in inverses:
        weights, groups = theta.view(-1, b)[blocks].flatten(), ids.view(-1, b)[blocks]
        for block, group, chosen in products.in_groups(groups.flatten(), b, count, b, BLOCK_PIECE):
            absent, chosen = chosen < 0, chosen.clamp_min(0)
            places = chosen % b
            inner = inverse[block[:, None, None], places[:, :, None], places[:, None, :]]
            theta_Q = weights[chosen].masked_fill(absent, 0.0)
            x = woodbury.solve(woodbury.kept_factor(inner, absent), theta_Q)
            out.index_add_(0, group, 0.5 * (theta_Q * x).sum(-1))
    return out

"""Blocks of more weights than there are gradients, such as the full matrix: worked in the m x m dual."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac import products, woodbury
from mfac.pages import BlockRun, Pages, Piece, Reduce
from mfac.precision import Precision, needs_float64, product_dtype

PAIRS = 1 << 10  # elements in several blocks that are worked on at once, at most
GROUP_NUMBERS = 1 << 22  # in the m x m matrices of groups that are factored at once

Pass = Callable[[], Iterator[tuple[Piece, Float[Tensor, "blocks m length"]]]]


class DualBlocks:
    """F_b⁻¹ = (I − G_bᵀ S_b⁻¹ G_b)/λ for the blocks of one run, S_b = mλ I + G_b G_bᵀ.

    G stays where it is and is streamed in pieces, once to build S and once or twice for a product. With `overwrite`,
    and if the stored dtype can hold it, G's memory takes W = L⁻¹ G instead: then S⁻¹ is the identity, and an element
    costs O(m) instead of O(m²).

    `weights` are c with F = λI + Σ c_i g_i g_iᵀ (None: 1/m each), and `gram` is G Gᵀ of every block, if it is known
    already. If ranks share the only block, each has some columns of G, and S and L in full: `reduce` sums G Gᵀ and G x
    over them.
    """

    def __init__(
        self,
        run: BlockRun,
        pages: Pages,
        damping: float,
        precision: Precision = "auto",
        weights: Float[Tensor, " m"] | None = None,
        gram: Float[Tensor, "blocks m m"] | None = None,
        overwrite: bool = False,
        reduce: Reduce | None = None,
    ):
        self.run = run
        self._pages = pages
        self._m = pages.shape[0]
        self._damping = damping
        self._precision: Precision = precision
        self._weights = weights
        # Rows scaled by it all have the weight 1/m.
        self._scale = None if weights is None else (self._m * weights).sqrt()[:, None]
        self._reduce = reduce
        self._whitened = False
        self._diagonal: Tensor | None = None
        self._dtype = product_dtype(precision, pages.dtype)
        if gram is None:
            self._L, self._K, self._dtype = self._factor(damping, self._dtype)
        else:
            self._K = self._scaled_gram(gram)
            self._L = woodbury.factor(self._K, self._m * damping)
        if overwrite and pages.in_place and self._dtype == pages.dtype:
            self._multiply_rows(self._whitening)
            self._whitened = True

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F⁻¹ x: loads a piece of whole blocks once, a slice of a block twice."""
        dtype, out = product_dtype("auto", self._dtype, x.dtype), torch.empty_like(x)
        for blocks, pieces in self._passes():
            p = self._project(x, blocks, pieces, dtype)
            a = p if self._whitened else self._scaled(woodbury.solve(self._L[blocks], self._scaled(p)))
            for piece, G in pieces():
                local = self._local(piece)
                out[local] = (x[local].to(dtype) - products.combine(G, a, dtype).flatten(0, 1)).div_(self._damping)
        return out

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x, from one pass over G."""
        dtype, total = product_dtype("auto", self._dtype, x.dtype), x.new_zeros(x.shape[1], dtype=torch.float64)
        for blocks, pieces in self._passes():
            p = self._project(x, blocks, pieces, dtype)
            z = p if self._whitened else woodbury.half_solve(self._L[blocks], self._scaled(p))
            squared = self._sum(self._split(x, blocks).double().square().sum(1))
            curvature = self._damping * squared + (self._L[blocks] @ z).square().sum(1) / self._m
            total += woodbury.quadratic_form(squared, z.square().sum(1), curvature, self._damping).sum(0)
        return total

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii; the second pass over G, made once and kept."""
        if self._diagonal is None:
            self._diagonal = self._L.new_empty(self.run.length * self.run.count)
            for blocks, pieces in self._passes():
                lower = self._L[blocks] if self._whitened else self._whitening(blocks)
                for piece, G in pieces():
                    weights = None if self._whitened else self._weights
                    squares, fisher = products.squares(lower, G, weights, self._dtype)
                    if self._whitened:  # L W has the columns of G again
                        squares, fisher = fisher, squares
                    fisher = (fisher / self._m if weights is None else fisher).add_(self._damping)
                    diagonal = woodbury.inverse_diagonal(squares, fisher, self._damping)
                    self._diagonal[self._local(piece)] = diagonal.flatten()
        return self._diagonal

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""

        def whitened(blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k m q"]:
            G = self._gather(blocks, places)
            return G if self._whitened else woodbury.half_solve(self._L[blocks], self._scaled(G))

        step = products.TILE // self._m if self.run.count == 1 else min(PAIRS, products.TILE // self._m**2)
        inner = products.pair_products(rows, columns, max(1, self.run.length), max(1, step), whitened)
        return ((rows == columns).double() - inner) / self._damping

    def forward(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F x = λx + (1/m) Gᵀ(G x)."""
        dtype, out = product_dtype("auto", self._dtype, x.dtype), torch.empty_like(x)
        for blocks, pieces in self._passes():
            a = self._scaled(self._scaled(self._project(x, blocks, pieces, dtype))) / self._m
            if self._whitened:  # G = L W
                L, tall = self._L[blocks], a if a.ndim == 3 else a[..., None]
                a = (L.transpose(1, 2) @ (L @ tall)).view_as(a)
            for piece, G in pieces():
                local = self._local(piece)
                product = products.combine(G, a, dtype).flatten(0, 1)
                out[local] = product.add_(x[local].to(dtype), alpha=self._damping)
        return out

    def leverages(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """h_i = [K S⁻¹]_ii and 1 − h_i, of the full matrix."""
        assert self._K is not None
        return woodbury.leverages(self._K[0], self._L[0], self._m * self._damping)

    def logdet(self) -> Float[Tensor, ""]:
        length = int(self._sum(self._L.new_tensor(float(self.run.length))))
        return -woodbury.log_det_fisher(self._L, self._m * self._damping, self._damping, length).sum()

    def refactor(self, damping: float) -> None:
        """Changes the damping; no pass over G, unless a smaller one needs more digits than K has."""
        if self._K is None:
            K = self._L @ self._L.transpose(1, 2)
            K.diagonal(dim1=1, dim2=2).sub_(self._m * self._damping)
        else:
            K = self._K
        if needs_float64(self._precision, self._dtype, K, self._m * damping):
            if self._whitened:
                raise ValueError(
                    f"damping {damping:g} needs float64, and the gradients have been overwritten by float32 numbers "
                    "made for a larger one; build the operator anew with overwrite=False"
                )
            L, self._K, self._dtype = self._factor(damping, torch.float64)
        else:
            L = woodbury.factor(K, self._m * damping)
        if self._whitened:
            change = torch.linalg.solve_triangular(L, self._L, upper=False)
            self._multiply_rows(lambda blocks: change[blocks])
        self._L, self._damping, self._diagonal = L, damping, None

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """δ = −θ on the removed weights and δ_R = G_Rᵀ S_R⁻¹ (G_Q θ_Q) on the kept ones, and ½ δᵀFδ."""
        assert not self._whitened
        delta, cost = torch.empty_like(theta), theta.new_zeros(())
        gone = torch.where(removed, theta, 0.0)
        for blocks, pieces in self._passes():
            u = self._scaled(self._project(gone, blocks, pieces, torch.float64))
            K, _ = self._gram(blocks, pieces, self._m * self._damping, self._dtype, removed)
            a = woodbury.solve(woodbury.factor(K, self._m * self._damping, overwrite=True), u)
            for piece, G in pieces():
                delta[self._local(piece)] = products.combine(G, self._scaled(a), torch.float64).flatten()
            squares = self._sum(self._split(gone, blocks).square().sum(1))
            cost += woodbury.removal_cost(squares, a, u, self._damping).sum()
        return torch.where(removed, -theta, delta), cost

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        total = self._damping * self._sum(delta.square().sum())
        for blocks, pieces in self._passes():
            total += self._scaled(self._project(delta, blocks, pieces, torch.float64)).square().sum() / self._m
        return total / 2

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        """F⁻¹ of the blocks, dense, some blocks at a time."""
        for blocks, pieces in self._passes():
            G = torch.cat([G.double() for _, G in pieces()], 2)
            W = woodbury.half_solve(self._L[blocks], self._scaled(G))
            inverse = -(W.transpose(1, 2) @ W)
            inverse.diagonal(dim1=1, dim2=2).add_(1)
            yield blocks, inverse.div_(self._damping)

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of `count` groups, `ids` being each weight's group; summed over a group's blocks."""
        out = theta.new_zeros(count)
        if not len(ids):
            return out
        position = torch.arange(len(ids), device=ids.device)
        keys, table, _, _ = products.grouped(position // self.run.length * count + ids, position)
        step = max(1, GROUP_NUMBERS // (self._m * max(self._m, table.shape[1])))
        for key, chosen in zip(keys.split(step), table.split(step), strict=True):
            blocks, present = key // count, chosen >= 0
            G_Q = self._scaled(self._gather(blocks, chosen.clamp_min(0) % self.run.length)) * present[:, None]
            theta_Q = torch.where(present, theta[chosen.clamp_min(0)], 0.0)
            distinct, which = blocks.unique(return_inverse=True)
            S = self._L[distinct] @ self._L[distinct].transpose(1, 2)
            out.index_add_(0, key % count, woodbury.group_costs(S[which], G_Q, theta_Q, self._damping))
        return out

    def _passes(self) -> Iterator[tuple[slice, Pass]]:
        """Some blocks at a time, with a function that goes over their columns: whole blocks, or one block in slices."""
        columns = self._pages.columns_at_once(self.run)
        if self.run.length == 0:  # a rank without a column still takes part in the sums
            yield slice(0, 1), partial(iter, [])
        elif self.run.length <= columns:
            for piece, G in self._pages.stream(self.run.pieces(columns)):
                yield piece.blocks, partial(iter, [(piece, G)])
        else:
            for block, pieces in groupby(self.run.pieces(columns), lambda piece: piece.blocks.start):
                yield slice(block, block + 1), partial(self._pages.stream, list(pieces))

    def _factor(self, damping: float, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, torch.dtype]:
        """L of every block, K if there is only one, and the dtype that products need."""
        shift, only = self._m * damping, self.run.count == 1
        # Column by column, as LAPACK writes and reads it: otherwise every block is transposed on its way in and out.
        L = torch.empty(self.run.count, self._m, self._m, dtype=torch.float64, device=self._pages.device).transpose(
            1, 2
        )
        for blocks, pieces in self._passes():
            K, dtype = self._gram(blocks, pieces, shift, dtype)
            L[blocks] = woodbury.factor(K, shift, overwrite=not only)
        return L, K if only else None, dtype

    def _gram(
        self, blocks: slice, pieces: Pass, shift: float, dtype: torch.dtype, removed: Bool[Tensor, " n"] | None = None
    ) -> tuple[Float[Tensor, "blocks m m"], torch.dtype]:
        """G Gᵀ over the pieces and the ranks, without the removed columns, and the dtype that products need.

        It is summed in float32 while the sum so far is small beside the damping, and in float64 from then on: so one
        pass is always enough.
        """
        asked, part = dtype, shift
        if self._reduce is not None:  # the errors of all ranks add up, so each is allowed its part
            part = shift / float(self._reduce(torch.ones((), device=self._pages.device)))
        K = torch.zeros(blocks.stop - blocks.start, self._m, self._m, dtype=torch.float64, device=self._pages.device)
        for piece, G in pieces():
            G = G if removed is None else _kept(G, piece.split(removed[self._local(piece)]))
            total = self._scaled_gram(products.gram(G, dtype)) + K
            if needs_float64(self._precision, dtype, total, part):
                dtype = torch.float64
                total = self._scaled_gram(products.gram(G, dtype)) + K
            K = total
        if self._reduce is not None:
            K = self._reduce(K)
            dtype = torch.float64 if needs_float64(self._precision, asked, K, shift) else asked
        if not bool(torch.isfinite(K.diagonal(dim1=1, dim2=2)).all()):
            self._pages.raise_for_rows(self._reduce)
        return K, dtype

    def _project(
        self, x: Float[Tensor, "n *k"], blocks: slice, pieces: Pass, dtype: torch.dtype
    ) -> Float[Tensor, "blocks m *k"]:
        """G x, over all ranks."""
        p = x.new_zeros(blocks.stop - blocks.start, self._m, *x.shape[1:], dtype=torch.float64)
        for piece, G in pieces():
            p += products.project(G, piece.split(x[self._local(piece)]), dtype)
        return self._sum(p)

    def _gather(self, blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k m q"]:
        """Columns of each block, in float64."""
        indices = self.run.start + blocks[:, None] * self.run.length + places
        return self._pages.gather(indices.flatten()).double().unflatten(1, places.shape).transpose(0, 1)

    def _scaled(self, p: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks m *k"]:
        if self._scale is None:
            return p
        return p * (self._scale if p.ndim == 3 else self._scale[:, 0])

    def _scaled_gram(self, K: Float[Tensor, "blocks m m"]) -> Float[Tensor, "blocks m m"]:
        return K if self._scale is None else K * (self._scale * self._scale.T)

    def _whitening(self, blocks: slice) -> Float[Tensor, "blocks m m"]:
        """The matrix that makes W of G."""
        Linv = woodbury.inverse_factor(self._L[blocks])
        return Linv if self._scale is None else Linv * self._scale.T

    def _multiply_rows(self, lower: Callable[[slice], Float[Tensor, "blocks m m"]]) -> None:
        for blocks, pieces in self._passes():
            matrix = lower(blocks)
            for _, G in pieces():
                products.whiten_(matrix, G, self._dtype)
                self._pages.accept_changes()

    def _split(self, x: Float[Tensor, "n *k"], blocks: slice) -> Float[Tensor, "blocks length *k"]:
        return x.unflatten(0, (self.run.count, self.run.length))[blocks]

    def _sum(self, values: Tensor) -> Tensor:
        return values if self._reduce is None else self._reduce(values)

    def _local(self, piece: Piece) -> slice:
        return slice(piece.columns.start - self.run.start, piece.columns.stop - self.run.start)


def _kept(G: Float[Tensor, "blocks m n"], removed: Bool[Tensor, "blocks n"]) -> Float[Tensor, "blocks m kept"]:
    """The columns that are not removed; of several blocks, zeros in the place of those that are."""
    return G[:, :, ~removed[0]] if len(G) == 1 else torch.where(removed[:, None], 0.0, G)

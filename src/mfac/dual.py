"""Blocks of more weights than there are gradients, such as the full matrix: worked in the m x m dual."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac import precision as judge
from mfac import products, woodbury
from mfac.pages import BlockRun, Pages, Pass, Piece, Reduce
from mfac.precision import Blocks, Factors, Precision, check_promise, first_dtype, needs_more, product_dtype

PAIRS = 1 << 10  # elements in several blocks that are worked on at once, at most
GROUP_NUMBERS = 1 << 22  # in the m x m matrices of groups that are factored at once


class DualBlocks:
    """F_b⁻¹ = (I − G_bᵀ S_b⁻¹ G_b)/λ for the blocks of one run, S_b = mλ I + G_b G_bᵀ.

    G stays where it is and is streamed in pieces, once to build S and once or twice for a product. With `overwrite`,
    and if the stored dtype can hold it, G's memory takes W = L⁻¹ G instead: then S⁻¹ is the identity, and an element
    costs O(m) instead of O(m²).

    `weights` are c with F = λI + Σ c_i g_i g_iᵀ (None: 1/m each), and `gram` is G Gᵀ, if it is known already. Of ranks
    that share the only block each has some columns of G: `reduce` sums G Gᵀ and G x over them.
    """

    def __init__(
        self, run: BlockRun, pages: Pages, damping: float, precision: Precision = "auto",
        weights: Float[Tensor, " m"] | None = None, gram: Float[Tensor, "blocks m m"] | None = None,
        overwrite: bool = False, reduce: Reduce | None = None,
    ):  # fmt: skip
        self.run = run
        self.redone = {"products": 0, "entries": 0}  # what was made again in float64
        self._pages, self._m, self._reduce = pages, pages.shape[0], reduce
        self._precision: Precision = precision
        self._scale = None if weights is None else (self._m * weights).sqrt()[:, None]  # scaled rows weigh 1/m each
        self._diagonal: Tensor | None = None
        self._whitened = False
        if gram is None:
            self._build(damping)
        else:
            self._restart(damping)
            self._accept(slice(0, 1), self._scaled_gram(gram), judge.gram_error(self._m))
        if reduce is not None:
            self._settle(slice(0, 1))  # now, while all ranks are here
        fits = overwrite and pages.in_place and self._dtype == pages.dtype
        if fits and not needs_more(precision, self._dtype, self._factors.gram(slice(None)), self._shift):
            self._multiply_rows(self._whitening)
            self._whitened = True

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F⁻¹ x: loads a piece of whole blocks once, a slice of a block twice; columns that need float64, again."""
        out = torch.empty_like(x)
        bad = self._write_product(out, x, product_dtype("auto", self._dtype, x.dtype))
        if bool(bad.any()):
            columns = bad.any(0)
            self.redone["products"] += int(columns.sum())
            part, made = (x, out) if x.ndim == 1 else (x[:, columns], out[:, columns])
            self._write_product(made, part, torch.float64, bad if x.ndim == 1 else bad.any(1))
            if x.ndim == 2:
                out[:, columns] = made
        return out

    def forward(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F x = λx + (1/m) Gᵀ(G x), in float64: what G x cancels comes back with Gᵀ."""
        dtype, out = product_dtype(self._precision, torch.float64), torch.empty_like(x)
        for blocks, pieces in self._passes():
            a = self._scaled(self._scaled(self._project(x, blocks, pieces, dtype)[1])) / self._m
            if self._whitened:  # G = L W
                L, tall = self._factors.L[blocks].tril(), a if a.ndim == 3 else a[..., None]
                a = (L.transpose(1, 2) @ (L @ tall)).view_as(a)
            for piece, G in pieces():
                local = self._local(piece)
                product = products.combine(G, a, dtype).flatten(0, 1)
                out[local] = product.add_(x[local].to(dtype), alpha=self._damping)
        return out

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x, from one pass over G, in float64."""
        total, dtype = x.new_zeros(x.shape[1], dtype=torch.float64), product_dtype(self._precision, torch.float64)
        for blocks, pieces in self._passes():
            judged, (squares, p) = self._settle(blocks), self._project(x, blocks, pieces, dtype)
            while True:
                z = p if self._whitened else woodbury.half_solve(self._factors.L[blocks], self._scaled(p))
                Gx = self._factors.L[blocks].tril() @ z if self._whitened else self._scaled(p)
                curvature = self._damping * squares + Gx.square().sum(1) / self._m
                found = woodbury.quadratic_form(squares, z.square().sum(1), curvature, self._damping)
                if not judged:
                    break
                terms = self._terms(blocks, woodbury.solve(self._factors.L[blocks], Gx))
                error = judge.form_error(self._factors.known(blocks), squares, terms, self._damping * found)
                if not self._polish(blocks, error):
                    check_promise(error, self._factors.condition.squares, self._shift)
                    break
            total += found.sum(0)
        return total

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii; the second pass over G, made once and kept."""
        if self._diagonal is None:
            found = self._factors.L.new_empty(self.run.length * self.run.count)
            for blocks, pieces in self._passes():
                judged = self._settle(blocks)
                lower = self._factors.L[blocks].tril() if self._whitened else self._whitening(blocks)
                for piece, G in pieces():
                    whitened, fisher = self._column_sums(blocks, lower, G, judged)
                    diagonal = woodbury.inverse_diagonal(whitened, fisher, self._damping)
                    found[self._local(piece)] = diagonal.flatten()
            self._diagonal = found
        return self._diagonal

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""
        step = products.TILE // self._m if self.run.count == 1 else min(PAIRS, products.TILE // self._m**2)
        columns_of: Callable[..., Tensor] = lambda b, places: self._exact_columns(b, self._gather(b, places))  # noqa: E731
        inner = products.pair_products(rows, columns, max(1, self.run.length), max(1, step), columns_of)
        return ((rows == columns).double() - inner) / self._damping

    def leverages(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """h_i = [K S⁻¹]_ii and 1 − h_i, of the full matrix."""
        self._settle(slice(0, 1))
        return woodbury.leverages(self._factors.gram(slice(0, 1))[0], self._factors.L[0], self._shift)

    def logdet(self) -> Float[Tensor, ""]:
        self._settle(slice(0, self.run.count))
        length = int(self._sum(self._factors.L.new_tensor(float(self.run.length))))
        return -woodbury.log_det_fisher(self._factors.L, self._shift, self._damping, length).sum()

    def diagnostics(self) -> dict[str, int | float]:
        """Blocks with K in float64, answers made again in float64, and the error that K makes at most."""
        self._settle(slice(0, self.run.count))
        return self.redone | self._factors.diagnostics()

    def refactor(self, damping: float) -> None:
        """Changes the damping; no pass over G, unless a smaller one needs more digits than K has."""
        K, before = self._factors.gram(slice(None)), vars(self).copy()
        if self._whitened and needs_more(self._precision, self._dtype, K, self._m * damping):
            raise ValueError(
                f"damping {damping:g} needs more digits than the numbers have that overwrote the gradients; build the "
                "operator anew with overwrite=False"
            )
        try:
            self._restart(damping)
            try:
                self._accept(slice(0, self.run.count), K, before["_factors"].condition.gram)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                self._build(damping)
            if self._reduce is not None:
                self._settle(slice(0, 1))
        except Exception:
            vars(self).update(before)
            raise
        if self._whitened:
            change = torch.linalg.solve_triangular(self._factors.L, before["_factors"].L.tril(), upper=False)
            self._multiply_rows(lambda blocks: change[blocks])

    def joint_removal(self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        """δ = −θ on the removed weights and δ_R = G_Rᵀ S_R⁻¹ (G_Q θ_Q) on the kept ones, and ½ δᵀFδ."""
        assert not self._whitened
        delta, cost, gone = torch.empty_like(theta), theta.new_zeros(()), torch.where(removed, theta, 0.0)
        for blocks, pieces in self._passes():
            squares, u = self._project(gone, blocks, pieces, torch.float64)
            u = self._scaled(u)
            a = self._removal(blocks, pieces, removed, u, squares)
            for piece, G in pieces():
                delta[self._local(piece)] = products.combine(G, self._scaled(a), torch.float64).flatten()
            cost += woodbury.removal_cost(squares, a, u, self._damping).sum()
        return torch.where(removed, -theta, delta), cost

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        total = delta.new_zeros(())
        for blocks, pieces in self._passes():
            squares, p = self._project(delta, blocks, pieces, torch.float64)
            total += self._damping * squares.sum() + self._scaled(p).square().sum() / self._m
        return total / 2

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        """F⁻¹ of the blocks, dense, some blocks at a time."""
        for blocks, pieces in self._passes():
            W = self._exact_columns(blocks, torch.cat([G.double() for _, G in pieces()], 2))
            inverse = -(W.transpose(1, 2) @ W)
            inverse.diagonal(dim1=1, dim2=2).add_(1)
            yield blocks, inverse.div_(self._damping)

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        """½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of `count` groups, `ids` being each weight's group; summed over a group's blocks."""
        out = theta.new_zeros(count)
        if not len(ids):
            return out
        self._polish(slice(0, self.run.count))  # differences of K need all its digits
        position = torch.arange(len(ids), device=ids.device)
        keys, table, _, _ = products.grouped(position // self.run.length * count + ids, position)
        step = max(1, GROUP_NUMBERS // (self._m * max(self._m, table.shape[1])))
        for key, chosen in zip(keys.split(step), table.split(step), strict=True):
            blocks, present = key // count, chosen >= 0
            G_Q = self._scaled(self._gather(blocks, chosen.clamp_min(0) % self.run.length)) * present[:, None]
            theta_Q = torch.where(present, theta[chosen.clamp_min(0)], 0.0)
            distinct, which = blocks.unique(return_inverse=True)
            S = self._factors.gram(distinct)
            S.diagonal(dim1=1, dim2=2).add_(self._shift)
            out.index_add_(0, key % count, woodbury.group_costs(S[which], G_Q, theta_Q, self._damping))
        return out

    def _build(self, damping: float) -> None:
        """K and its factor for every block: in float64 for blocks where float32 leaves S indefinite."""
        self._restart(damping)
        first = judge.gram_dtype(self._precision, self._dtype, self._m)
        for blocks, pieces in self._passes():
            try:
                self._accept(blocks, *self._gram(blocks, pieces, first))
            except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                if self._precision != "auto" or self._dtype == torch.float64:
                    raise
                self._accept(blocks, *self._gram(blocks, pieces, torch.float64))

    def _restart(self, damping: float) -> None:
        self._damping, self._shift = damping, self._m * damping
        self._diagonal = None
        self._dtype: torch.dtype = first_dtype(self._precision, self._pages.dtype, self._shift)
        self._factors: Factors = Factors(self.run.count, self._m, self._shift, self._pages.device)

    def _accept(self, blocks: slice, K: Float[Tensor, "blocks m m"], error: float | Tensor) -> None:
        if not self._factors.accept(blocks, K, error):
            self._pages.raise_for_rows(self._reduce)

    def _settle(self, blocks: Blocks) -> bool:
        """Whether answers of the blocks are judged; if so, with a K that is good enough for the estimates to hold."""
        if self._whitened or self._precision == "float32":
            return False
        self._polish(blocks, self._factors.known(blocks).grown)
        return True

    def _polish(self, blocks: Blocks, error: Tensor | None = None, together: bool = True) -> bool:
        """Makes K in float64 for the blocks whose answers have too large an error by it; whether there was one."""
        rough = self._factors.rough(blocks)
        if error is not None:
            rough = rough & ~(error.flatten(1) if error.ndim > 1 else error[:, None]).le(judge.PRODUCT_TOLERANCE).all(1)
        if self._precision != "auto" or not bool(rough.any()) or (self._reduce is not None and not together):
            return False  # ranks that are not here together cannot sum K
        which = torch.zeros(self.run.count, dtype=torch.bool)
        which[blocks] = rough.cpu()
        for some, pieces in self._passes(which):
            self._accept(some, *self._gram(some, pieces, torch.float64))
        return True

    def _write_product(self, out: Tensor, x: Tensor, dtype: torch.dtype, which: Tensor | None = None) -> Tensor:
        """Writes F⁻¹x of all blocks or of some [count]; returns which blocks and columns need more [count, *k]."""
        bad = torch.zeros(self.run.count, *x.shape[1:], dtype=torch.bool)
        for blocks, pieces in self._passes(which):
            judged, (squares, p) = self._settle(blocks), self._project(x, blocks, pieces, dtype)
            a, p = p, self._scaled(p)
            while not self._whitened:
                a = woodbury.solve(self._factors.L[blocks], p)
                if not judged:
                    break
                known, terms = self._factors.known(blocks), self._terms(blocks, a)
                rest = squares - (p * a).sum(1) - self._shift * a.square().sum(1)
                rounding, by_gram = judge.product_errors(dtype, known, squares, terms, rest)
                if not self._polish(blocks, by_gram):
                    break
            if judged and dtype == torch.float32:
                bad[blocks] = ~(rounding <= judge.PRODUCT_TOLERANCE).cpu()
                if bool(bad[blocks].all()):
                    continue
            a = a if self._whitened else self._scaled(a)
            for piece, G in pieces():
                local = self._local(piece)
                out[local] = (x[local].to(dtype) - products.combine(G, a, dtype).flatten(0, 1)).div_(self._damping)
            if judged and dtype == torch.float64:  # now that the difference is known, and not only estimated
                rest = self._sum((self._split(out, blocks).double() * self._damping).square().sum(1))
                judge.check_products(known, self._factors.L[blocks], self._shift, squares, terms, rest)
        return bad

    def _column_sums(self, blocks: slice, lower: Tensor, G: Tensor, judged: bool) -> tuple[Tensor, Tensor]:
        """‖W_i‖² and F_ii of columns of G; those that need it in float64, and by a better K."""
        known = self._factors.known(blocks)
        if self._whitened:  # L W has the columns of G again
            fisher, sums = products.squares(lower, G, torch.ones_like(lower[:, :1]), self._dtype)
            return sums[:, 0], fisher / self._m + self._damping
        weights = torch.stack((torch.full_like(known.inverse, 1 / self._m), known.inverse), 1)
        weights = weights if self._scale is None else weights * self._scale[:, 0].square()
        whitened, sums = products.squares(lower, G, weights, self._dtype)
        fisher, spread = sums[:, 0] + self._damping, sums[:, 1]
        if judged:
            error = judge.diagonal_error(self._dtype, known, whitened, spread, self._damping / fisher)
            bad = ~(error <= judge.limit(self._dtype))
            if bool(bad.any()):
                some, columns = bad.any(1).nonzero(), bad.any(0).nonzero()[:, 0]
                self.redone["entries"] += len(some) * len(columns)
                part = G[some[:, 0]][:, :, columns].double()
                whitened[some, columns] = self._exact_columns(some[:, 0] + blocks.start, part).square().sum(1)
        return whitened, fisher

    def _exact_columns(self, blocks: Blocks, G: Float[Tensor, "k m q"]) -> Float[Tensor, "k m q"]:
        """W of columns of some blocks, in float64, each judged by itself."""
        judged, G = self._settle(blocks), self._scaled(G)
        while not self._whitened:
            W = woodbury.half_solve(self._factors.L[blocks], G)
            if not judged:
                return W
            z = torch.linalg.solve_triangular(self._factors.L[blocks].tril().transpose(1, 2), W, upper=True)
            known, whitened = self._factors.known(blocks), W.square().sum(1)
            least = self._damping / (self._damping + G.square().sum(1) / self._m)
            terms = torch.einsum("bm,bmq->bq", known.squares + self._shift, z.square())
            error = judge.column_error(known, terms, (1 - whitened).maximum(least))
            if not self._polish(blocks, error, together=False):
                check_promise(error, known.squares, self._shift)
                return W
        return G

    def _removal(self, blocks: slice, pieces: Pass, removed: Tensor, u: Tensor, squares: Tensor) -> Tensor:
        """S_R⁻¹ u, with S_R by products in float32 where that is good enough."""
        for dtype in (judge.gram_dtype(self._precision, self._dtype, self._m), torch.float64):
            K, gram = self._gram(blocks, pieces, dtype, removed)
            last = dtype == torch.float64 or self._precision != "auto"
            try:
                L = woodbury.factor(K, self._shift)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                if last:
                    raise
                continue
            a, known = woodbury.solve(L, u), K.diagonal(dim1=1, dim2=2)
            moved = squares + torch.einsum("bi,bij,bj->b", a, K, a)
            growth = woodbury.growth(woodbury.inverse_factor(L), known)
            error = judge.removal_error(gram, growth, (known * a.square()).sum(1), moved)
            if last and self._precision != "float32":
                check_promise(error, known, self._shift)
            if last or bool((error <= judge.PRODUCT_TOLERANCE).all()):
                break
        return a

    def _passes(self, which: Bool[Tensor, " count"] | None = None) -> Iterator[tuple[slice, Pass]]:
        return self._pages.passes(self.run, None if which is None else which.tolist())

    def _gram(
        self, blocks: slice, pieces: Pass, dtype: torch.dtype, removed: Bool[Tensor, " n"] | None = None
    ) -> tuple[Float[Tensor, "blocks m m"], Tensor]:
        """G Gᵀ over the pieces and the ranks, without the removed columns; and its error, measured on some rows."""
        count, m, sample = blocks.stop - blocks.start, self._m, judge.sample(self._m)
        K = torch.zeros(count, m, m, dtype=torch.float64, device=self._pages.device)
        exact = K[:, sample, sample].clone()
        for piece, G in pieces():
            G = G if removed is None else products.kept(G, piece.split(removed[self._local(piece)]))
            K += products.gram(G, dtype)
            if dtype == torch.float32:
                exact += products.gram(G[:, sample], torch.float64)
        K = self._scaled_gram(self._sum(K))
        if dtype == torch.float64:
            return K, K.new_full((count,), judge.gram_error(m))
        return K, judge.measured_error(K, self._scaled_gram(self._sum(exact), sample), sample)

    def _terms(self, blocks: slice, a: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks *k"]:
        """Σ_k D_k a_k²."""
        return torch.einsum("bm,bm...->b...", self._factors.condition.squares[blocks], a.square())

    def _project(self, x: Tensor, blocks: slice, pieces: Pass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """‖x‖² of each block, and G x; over all ranks."""
        p = x.new_zeros(blocks.stop - blocks.start, self._m + 1, *x.shape[1:], dtype=torch.float64)
        p[:, -1] = torch.linalg.vector_norm(self._split(x, blocks), dim=1, dtype=torch.float64).square()
        for piece, G in pieces():
            p[:, :-1] += products.project(G, piece.split(x[self._local(piece)]), dtype)
        p = self._sum(p)
        return p[:, -1], p[:, :-1]

    def _gather(self, blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k m q"]:
        """Columns of each block, in float64."""
        indices = self.run.start + blocks[:, None] * self.run.length + places
        return self._pages.gather(indices.flatten()).double().unflatten(1, places.shape).transpose(0, 1)

    def _scaled(self, p: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks m *k"]:
        if self._scale is None:
            return p
        return p * (self._scale if p.ndim == 3 else self._scale[:, 0])

    def _scaled_gram(self, K: Float[Tensor, "blocks s s"], rows: slice = slice(None)) -> Float[Tensor, "blocks s s"]:
        return K if self._scale is None else K * (self._scale[rows] * self._scale[rows].T)

    def _whitening(self, blocks: slice) -> Float[Tensor, "blocks m m"]:
        """The matrix that makes W of G."""
        Linv = woodbury.inverse_factor(self._factors.L[blocks])
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

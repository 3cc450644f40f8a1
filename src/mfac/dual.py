"""Blocks of more weights than there are gradients, such as the full matrix: worked in the m x m dual."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac import precision as judge
from mfac import products, woodbury
from mfac.pages import BlockRun, Pages, Pass, Piece, Reduce
from mfac.precision import Blocks, Factors, Precision, product_dtype

PAIRS = 1 << 10  # elements in several blocks that are worked on at once, at most
GROUP_NUMBERS = 1 << 22  # in the m x m matrices of groups that are factored at once

KnownGram = Callable[[torch.dtype], tuple[Float[Tensor, "1 m m"], float | Tensor]]
"""G Gᵀ of the only block, over all ranks, as exact as products in a dtype; and its error."""


class DualBlocks:
    """F_b⁻¹ = (I − G_bᵀ S_b⁻¹ G_b)/λ for the blocks of one run, S_b = mλ I + G_b G_bᵀ.

    G stays where it is and is streamed in pieces, once to build S and once or twice for a product. With `overwrite`,
    and if the stored dtype can hold it, G's memory takes W = L⁻¹ G instead: an element then costs O(m) instead of
    O(m²).

    `weights` are c with F = λI + Σ c_i g_i g_iᵀ (None: 1/m each), and `gram` gives G Gᵀ where somebody keeps it. Of
    ranks that share the only block each has some columns of G: `reduce` sums G Gᵀ and G x over them.
    """

    def __init__(
        self, run: BlockRun, pages: Pages, damping: float, precision: Precision = "auto",
        weights: Float[Tensor, " m"] | None = None, gram: KnownGram | None = None, overwrite: bool = False,
        reduce: Reduce | None = None,
    ):  # fmt: skip
        self.run = run
        self.redone = {"products": 0, "entries": 0}  # what was made again in float64
        self._pages, self._m, self._reduce, self._known_gram = pages, pages.shape[0], reduce, gram
        self._precision: Precision = precision
        equal = torch.ones(self._m, dtype=torch.float64, device=pages.device)
        self._scale = equal if weights is None else (self._m * weights).sqrt()  # scaled rows weigh 1/m each
        self._diagonal: Tensor | None = None
        self._whitened = False
        self._build(damping)
        fits = overwrite and pages.in_place and self._dtype == pages.dtype
        if fits and not judge.needs_more(precision, self._dtype, self._factors.gram(slice(None)), self._factors.shift):
            self._multiply_rows(self._whitening)
            self._whitened = True

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F⁻¹ x: two passes over G, or one where a piece holds whole blocks; columns that need float64, again."""
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
            _, p = self._project(x, blocks, pieces, dtype)
            for local, product in self._combine(p / self._m, blocks, pieces, dtype):
                out[local] = product.add_(x[local].to(dtype), alpha=self._damping)
        return out

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x, from one pass over G, in float64."""
        dtype = product_dtype(self._precision, torch.float64)
        found = [self._half_solve(b, *self._project(x, b, pieces, dtype))[1].sum(0) for b, pieces in self._passes()]
        return torch.stack(found).sum(0)

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii; the second pass over G, made once and kept."""
        if self._diagonal is None:
            found = self._factors.L.new_empty(self.run.length * self.run.count)
            for blocks, pieces in self._passes():
                judged = self._settle(blocks)
                lower = self._factors.L[blocks].tril() if self._whitened else self._whitening(blocks)
                for piece, G in pieces():
                    whitened, fisher = self._column_sums(blocks, lower, G, judged)
                    found[self._local(piece)] = woodbury.inverse_diagonal(whitened, fisher, self._damping).flatten()
            self._diagonal = found
        return self._diagonal

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""
        step = products.TILE // self._m if self.run.count == 1 else min(PAIRS, products.TILE // self._m**2)

        def whitened(blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k m q"]:
            return self._exact_columns(blocks, self._gather(blocks, places))

        inner = products.pair_products(rows, columns, max(1, self.run.length), max(1, step), whitened)
        return ((rows == columns).double() - inner) / self._damping

    def leverages(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """h_i = [K S⁻¹]_ii and 1 − h_i, of the full matrix."""
        self._check_inverse()
        return woodbury.leverages(self._factors.gram(slice(0, 1))[0], self._factors.L[0], self._factors.shift)

    def logdet(self) -> Float[Tensor, ""]:
        self._check_inverse()
        length = int(self._sum(self._factors.L.new_tensor(float(self.run.length))))
        return -woodbury.log_det_fisher(self._factors.L, self._factors.shift, self._damping, length).sum()

    def diagnostics(self) -> dict[str, int | float]:
        """Blocks with K in float64, answers made again in float64, and the error that K makes at most."""
        self._settle(slice(0, self.run.count))
        return self.redone | self._factors.diagnostics()

    def refactor(self, damping: float) -> None:
        """Changes the damping; no pass over G, unless a smaller one needs more digits than K has."""
        K, before = self._factors.gram(slice(None)), vars(self).copy()
        if self._whitened and judge.needs_more(self._precision, self._dtype, K, self._m * damping):
            raise ValueError(
                f"damping {damping:g} needs more digits than the numbers have that overwrote the gradients; build the "
                "operator anew with overwrite=False"
            )
        try:
            self._build(damping, (K, self._factors.condition.gram))
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
            a = self._removal(blocks, pieces, removed, u, squares)
            for local, product in self._combine(a, blocks, pieces, torch.float64):
                delta[local] = product
            cost += woodbury.removal_cost(squares, a, u, self._damping).sum()
        return torch.where(removed, -theta, delta), cost

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        total = delta.new_zeros(())
        for blocks, pieces in self._passes():
            squares, p = self._project(delta, blocks, pieces, torch.float64)
            total += self._damping * squares.sum() + p.square().sum() / self._m
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
        self._polish(slice(0, self.run.count))  # differences of K need all its digits
        for blocks, group, chosen in products.in_groups(ids, self.run.length, count, self._m, GROUP_NUMBERS):
            present, chosen = chosen >= 0, chosen.clamp_min(0)
            G_Q = self._scaled(self._gather(blocks, chosen % self.run.length)) * present[:, None]
            theta_Q = torch.where(present, theta[chosen], 0.0)
            distinct, which = blocks.unique(return_inverse=True)
            S = self._factors.damped(distinct)
            out.index_add_(0, group, woodbury.group_costs(S[which], G_Q, theta_Q, self._damping))
        return out

    def _build(self, damping: float, known: tuple[Tensor, Tensor] | None = None) -> None:
        """The factors of every block, from what is `known` of K and its error, if that is good enough."""
        self._damping, self._diagonal = damping, None
        shift = self._m * damping
        self._dtype: torch.dtype = judge.first_dtype(self._precision, self._pages.dtype, shift)
        self._factors: Factors = Factors(self.run.count, self._m, shift, self._pages.device)
        try:
            if known is not None:
                self._accept(slice(0, self.run.count), *known)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            known = None
        for blocks, pieces in self._passes() if known is None else ():
            try:
                length = self.run.length if self.run.count > 1 else None
                first = judge.gram_dtype(self._precision, self._dtype, self._m, length)
                self._accept(blocks, *self._gram(blocks, pieces, first))
            except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                if self._precision != "auto" or self._dtype == torch.float64:
                    raise
                self._accept(blocks, *self._gram(blocks, pieces, torch.float64))
        if self._reduce is not None:
            self._settle(slice(0, 1))  # now, while all ranks are here

    def _accept(self, blocks: slice, K: Float[Tensor, "blocks m m"], error: float | Tensor) -> None:
        if not self._factors.accept(blocks, K, error):
            self._pages.raise_for_rows(self._reduce)

    def _settle(self, blocks: Blocks) -> bool:
        """Whether answers of the blocks are judged; if so, with a K that is good enough for the estimates to hold."""
        if self._whitened or self._precision == "float32":
            return False
        self._polish(blocks, self._factors.known(blocks).grown)
        return True

    def _check_inverse(self) -> None:
        """Raises LinAlgError unless S⁻¹ has the digits for every 1 − h_i, and for a determinant."""
        if self._settle(slice(0, self.run.count)):
            known = self._factors.known(slice(None))
            judge.check_promise(known.grown, known.squares, self._factors.shift)

    def _polish(self, blocks: Blocks, error: Tensor | None = None, together: bool = True) -> bool:
        """Makes K in float64 for the blocks whose answers have too large an error by it; whether there was one."""
        rough = self._factors.rough(blocks)
        if error is not None:
            rough = rough & ~(error.flatten(1) if error.ndim > 1 else error[:, None]).le(judge.PRODUCT_TOLERANCE).all(1)
        if self._precision != "auto" or not bool(rough.any()) or (self._reduce is not None and not together):
            return False  # ranks that are not here together cannot sum K
        which = torch.zeros(self.run.count, dtype=torch.bool, device="cpu")
        which[blocks] = rough.cpu()
        for some, pieces in self._passes(which):
            self._accept(some, *self._gram(some, pieces, torch.float64))
        return True

    def _write_product(self, out: Tensor, x: Tensor, dtype: torch.dtype, which: Tensor | None = None) -> Tensor:
        """Writes F⁻¹x of all blocks or of some [count]; returns which blocks and columns need more [count, *k]."""
        bad = torch.zeros(self.run.count, *x.shape[1:], dtype=torch.bool, device="cpu")
        for blocks, pieces in self._passes(which):
            judged, (squares, p) = self._settle(blocks), self._project(x, blocks, pieces, dtype)
            while True:
                a = woodbury.solve(self._factors.L[blocks], p)
                if not judged:
                    break
                known, terms = self._factors.known(blocks), self._terms(blocks, a)
                rest = squares - (p * a).sum(1) - self._factors.shift * a.square().sum(1)
                rounding, by_gram = judge.product_errors(dtype, known, squares, terms, rest)
                if not self._polish(blocks, by_gram):
                    break
            if judged and dtype == torch.float32:
                bad[blocks] = ~(rounding <= judge.PRODUCT_TOLERANCE).cpu()
                if bool(bad[blocks].all()):
                    continue
            for local, product in self._combine(a, blocks, pieces, dtype):
                out[local] = (x[local].to(dtype) - product).div_(self._damping)
            if judged and dtype == torch.float64:  # now that the difference is known, and not only estimated
                rest = self._sum((self._split(out, blocks).double() * self._damping).square().sum(1))
                judge.check_products(known, self._factors.L[blocks], self._factors.shift, squares, terms, rest)
        return bad

    def _half_solve(self, blocks: Blocks, squares: Tensor, p: Tensor, together: bool = True) -> tuple[Tensor, Tensor]:
        """L⁻¹p and xᵀF⁻¹x, from ‖x‖² and p = G x in float64, each judged by itself."""
        judged, curvature = self._settle(blocks), self._damping * squares + p.square().sum(1) / self._m
        while True:
            z = woodbury.half_solve(self._factors.L[blocks], p)
            form = woodbury.quadratic_form(squares, z.square().sum(1), curvature, self._damping)
            if not judged:
                return z, form
            terms = self._terms(blocks, woodbury.solve(self._factors.L[blocks], p))
            error = judge.form_error(self._factors.known(blocks), squares, terms, self._damping * form)
            if not self._polish(blocks, error, together):
                judge.check_promise(error, self._factors.condition.squares, self._factors.shift)
                return z, form

    def _exact_columns(self, blocks: Blocks, G: Float[Tensor, "k m q"]) -> Float[Tensor, "k m q"]:
        """W of columns of some blocks, in float64."""
        return G if self._whitened else self._half_solve(blocks, torch.ones_like(G[:, 0]), self._scaled(G), False)[0]

    def _column_sums(self, blocks: slice, lower: Tensor, G: Tensor, judged: bool) -> tuple[Tensor, Tensor]:
        """‖W_i‖² and F_ii of columns of G; those that need it in float64, and by a better K."""
        known = self._factors.known(blocks)
        if self._whitened:  # L W has the columns of G again
            fisher, sums = products.squares(lower, G, torch.ones_like(lower[:, :1]), self._dtype)
            return sums[:, 0], fisher / self._m + self._damping
        weights = torch.stack((torch.full_like(known.inverse, 1 / self._m), known.inverse), 1)
        whitened, sums = products.squares(lower, G, weights * self._scale.square(), self._dtype)
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

    def _removal(self, blocks: slice, pieces: Pass, removed: Tensor, u: Tensor, squares: Tensor) -> Tensor:
        """S_R⁻¹ u, with S_R in float64 unless float32 is asked for."""
        factors = Factors(blocks.stop - blocks.start, self._m, self._factors.shift, u.device)
        factors.accept(slice(None), *self._gram(blocks, pieces, product_dtype(self._precision, torch.float64), removed))
        a = woodbury.solve(factors.L, u)
        if self._precision != "float32":
            known, moved = factors.known(slice(None)), squares + (a * u).sum(1) - factors.shift * a.square().sum(1)
            error = judge.removal_error(known, (known.squares * a.square()).sum(1), moved)
            judge.check_promise(error, known.squares, factors.shift)
        return a

    def _passes(self, which: Bool[Tensor, " count"] | None = None) -> Iterator[tuple[slice, Pass]]:
        return self._pages.passes(self.run, None if which is None else which.tolist())

    def _gram(
        self, blocks: slice, pieces: Pass, dtype: torch.dtype, removed: Bool[Tensor, " n"] | None = None
    ) -> tuple[Float[Tensor, "blocks m m"], float | Tensor]:
        """G Gᵀ over the pieces and the ranks, without the removed columns; and its error, measured on some rows."""
        if self._known_gram is not None and removed is None:
            K, error = self._known_gram(dtype)
            return self._scaled(K) * self._scale, error
        count, m, sample = blocks.stop - blocks.start, self._m, judge.sample(self._m)
        K = torch.zeros(count, m, m, dtype=torch.float64, device=self._pages.device)
        exact = K[:, sample, sample].clone()
        for piece, G in pieces():
            G = G if removed is None else products.kept(G, piece.split(removed[self._local(piece)]))
            K += products.gram(G, dtype)
            if dtype == torch.float32:
                exact += products.gram(G[:, sample], torch.float64)
        K = self._sum(K)
        error = judge.gram_error(m) if dtype == torch.float64 else judge.measured_error(K, self._sum(exact), sample)
        return self._scaled(K) * self._scale, error

    def _terms(self, blocks: Blocks, a: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks *k"]:
        """Σ_k D_k a_k²."""
        squares = self._factors.condition.squares[blocks]
        return (squares.view(*squares.shape, *[1] * (a.ndim - 2)) * a.square()).sum(1)

    def _project(self, x: Tensor, blocks: slice, pieces: Pass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """‖x‖² of each block, and G x; over all ranks."""
        p = x.new_zeros(blocks.stop - blocks.start, self._m + 1, *x.shape[1:], dtype=torch.float64)
        p[:, -1] = torch.linalg.vector_norm(self._split(x, blocks), dim=1, dtype=torch.float64).square()
        if self._pages.window is not None:
            p[:, :-1] = self._pages.window.project(self._m, x, dtype)
        else:
            for piece, G in pieces():
                p[:, :-1] += products.project(G, piece.split(x[self._local(piece)]), dtype)
        p = self._sum(p)
        if not bool(p[:, -1].isfinite().all()):
            raise ValueError("the vector has numbers that are not finite, or too large to be squared in float64")
        return p[:, -1], self._of_stored("bij,bj...->bi...", blocks, p[:, :-1])

    def _combine(self, a: Tensor, blocks: slice, pieces: Pass, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Gᵀa, some places of the run at a time."""
        a = self._of_stored("bji,bj...->bi...", blocks, a)
        if self._pages.window is not None:
            yield slice(None), self._pages.window.combine(a[0], dtype)
        else:
            for piece, G in pieces():
                yield self._local(piece), products.combine(G, a, dtype).flatten(0, 1)

    def _gather(self, blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k m q"]:
        """Columns of each block, in float64."""
        indices = self.run.start + blocks[:, None] * self.run.length + places
        return self._pages.gather(indices.flatten()).double().unflatten(1, places.shape).transpose(0, 1)

    def _of_stored(self, by_lower: str, blocks: slice, p: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks m *k"]:
        """From products with the rows as stored to those with G, or from coefficients of G to theirs: G is L W."""
        if self._whitened:
            return torch.einsum(by_lower, self._factors.L[blocks].tril(), p)
        return self._scaled(p)

    def _scaled(self, p: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks m *k"]:
        return p * self._scale.view(-1, *[1] * (p.ndim - 2))

    def _whitening(self, blocks: slice) -> Float[Tensor, "blocks m m"]:
        """The matrix that makes W of G."""
        return self._factors.inverse_factor(blocks) * self._scale

    def _multiply_rows(self, lower: Callable[[slice], Float[Tensor, "blocks m m"]]) -> None:
        for blocks, pieces in self._passes():
            matrix = lower(blocks)
            for _, G in pieces():
                with torch.inference_mode(G.is_inference()):  # where alone such rows can be written to
                    products.whiten_(matrix, G, self._dtype)
                self._pages.accept_changes()

    def _split(self, x: Float[Tensor, "n *k"], blocks: slice) -> Float[Tensor, "blocks length *k"]:
        return x.unflatten(0, (self.run.count, self.run.length))[blocks]

    def _sum(self, values: Tensor) -> Tensor:
        return values if self._reduce is None else self._reduce(values)

    def _local(self, piece: Piece) -> slice:
        return slice(piece.columns.start - self.run.start, piece.columns.stop - self.run.start)

"""Blocks of more weights than there are gradients (the full matrix among them): worked in the m x m dual."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products, woodbury
from mfac.blocks import Piece, Run
from mfac.columns import Ranks
from mfac.pages import Pages, SpreadPages
from mfac.precision import float32_holds


class DualBlocks:
    """F_b⁻¹ = (I − G_bᵀ S_b⁻¹ G_b)/λ for the blocks of one run, S_b = mλ I + G_b G_bᵀ.

    G stays where it is and is streamed in pieces, once to build S and once or twice for a product. With `overwrite`,
    and where the stored dtype can hold it, G's memory takes W = L⁻¹ G instead: then S⁻¹ is the identity, and an element
    costs O(m) where it cost O(m²).

    Of a block that several ranks share, each has some columns of G, and S and L in full: G Gᵀ and G x are sums over
    the ranks, the rest is their own.

    Args:
        run: where the blocks lie.
        pages: where G is, on one device or on several.
        weights: c with F = λI + Σ c_i g_i g_iᵀ; None: 1/m each.
        damping: λ.
        columns: the length of a piece.
        dtype: of the products.
        auto: go from float32 to float64 where float32 is not safe.
        gram: G Gᵀ of every block, where it is known already.
        overwrite: whether G's memory may be used.
        ranks: that share the block, which is the only one of its run then.
    """

    def __init__(
        self,
        run: Run,
        pages: Pages | SpreadPages,
        weights: Float[Tensor, " m"] | None,
        damping: float,
        columns: int,
        dtype: torch.dtype,
        auto: bool,
        gram: Float[Tensor, "blocks m m"] | None = None,
        overwrite: bool = False,
        ranks: Ranks | None = None,
    ):
        self.run = run
        self._pages = pages
        self._ranks = Ranks() if ranks is None else ranks
        self._m = pages.shape[0]
        self._weights = weights
        # Rows scaled by it all have the weight 1/m.
        self._scale = None if weights is None else (self._m * weights).sqrt()[:, None]
        self._damping = damping
        self._columns = columns
        self._auto = auto
        self._whitened = False
        self._diagonal: Tensor | None = None
        if gram is None:
            self._L, self._dtype = self._factor(damping, dtype)
        else:
            self._L, self._dtype = woodbury.factor(self._scaled_gram(gram), self._shift), dtype
        if overwrite and pages.in_place and self._dtype == pages.dtype:
            self._whiten()

    @property
    def _shift(self) -> float:
        return self._m * self._damping

    @property
    def device(self) -> torch.device:
        """Where vectors are expected."""
        return self._pages.device

    @property
    def _whole_blocks(self) -> bool:
        whole = isinstance(self._pages, Pages) and self._ranks.group is None
        return whole and self.run.length <= self._columns

    def apply(self, x: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """F⁻¹ x: one load of a piece that has whole blocks, two of one that has a slice."""
        dtype = torch.float64 if x.dtype == torch.float64 else self._dtype
        out = torch.empty_like(x)
        projected = None if self._whole_blocks else self._coefficients(self._project(x, dtype), slice(None))
        for piece, G in self._stream():
            local = self._local(piece)
            part = x[local].to(G.device, dtype)
            if projected is None:
                a = self._coefficients(products.project(G, piece.split(part), dtype), piece.blocks)
            else:
                a = projected[piece.blocks].to(G.device)
            out[local] = (part - products.combine(G, a, dtype).flatten(0, 1)).div_(self._damping)
        return out

    def quadratic_form(self, x: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
        """xᵀF⁻¹x, from one pass over G."""
        dtype = torch.float64 if x.dtype == torch.float64 else self._dtype
        p = self._project(x, dtype)
        z = p if self._whitened else woodbury.half_solve(self._L, self._scaled(p))
        squared = self._ranks.sum_(x.double().unflatten(0, (self.run.count, self.run.length)).square().sum(1))
        curvature = self._damping * squared + (self._L @ z).square().sum(1) / self._m
        return woodbury.quadratic_form(squared, z.square().sum(1), curvature, self._damping).sum(0)

    def diagonal(self) -> Float[Tensor, " n"]:
        """[F⁻¹]_ii; the second pass over G, made once and remembered."""
        if self._diagonal is None:
            self._diagonal = self._stream_diagonal()
        return self._diagonal

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries counted from the run's start; zero between blocks."""
        out = torch.zeros(len(rows), dtype=torch.float64, device=self._L.device)
        same = (rows // self.run.length == columns // self.run.length).nonzero()[:, 0]
        # With several blocks, each pair brings its own factor.
        step = products.TILE // (self._m if self.run.count == 1 or self._whitened else self._m**2)
        for chosen in same.split(max(1, step)):
            block = rows[chosen] // self.run.length
            left, right = (self._whitened_columns(index[chosen], block) for index in (rows, columns))
            out[chosen] = (rows[chosen] == columns[chosen]).double() - (left * right).sum(-1)
        return out / self._damping

    def logdet(self) -> Float[Tensor, ""]:
        """log det F⁻¹."""
        return -woodbury.log_det_fisher(self._L, self._shift, self._damping, self._ranks.total(self.run.length)).sum()

    def refactor(self, damping: float) -> None:
        """Makes it right for another damping; no pass over G, unless a smaller one asks for more digits than K has."""
        K = self._L @ self._L.transpose(1, 2)
        K.diagonal(dim1=1, dim2=2).sub_(self._shift)
        if self._auto and self._dtype == torch.float32 and not float32_holds(K, self._m * damping):
            if self._whitened:
                raise ValueError(
                    f"damping {damping:g} needs float64, and the gradients have been overwritten by float32 numbers "
                    "made for a larger one; build the operator anew with overwrite=False"
                )
            L, self._dtype = self._factor(damping, torch.float64)
        else:
            L = woodbury.factor(K, self._m * damping)
        if self._whitened:
            self._multiply_rows(torch.linalg.solve_triangular(L, self._L, upper=False))
        self._L, self._damping, self._diagonal = L, damping, None

    def _factor(self, damping: float, dtype: torch.dtype) -> tuple[Float[Tensor, "blocks m m"], torch.dtype]:
        """L of every block, and the dtype that products need; a piece of whole blocks goes from G to L in cache."""
        shift = self._m * damping
        if not self._whole_blocks:
            K, dtype = self._gram(shift, dtype)
            with self._ranks.together("the factor of the Gram matrix"):
                return woodbury.factor(K, shift, overwrite=True), dtype
        # Column by column, as LAPACK writes and reads it: otherwise every block is transposed on its way in and out.
        L = torch.empty(self.run.count, self._m, self._m, dtype=torch.float64, device=self.device).transpose(1, 2)
        for piece, G in self._stream():
            K, dtype = self._add_gram(None, G, shift, dtype)
            L[piece.blocks] = woodbury.factor(K, shift, overwrite=True)
        return L, dtype

    def _gram(self, shift: float, dtype: torch.dtype) -> tuple[Float[Tensor, "blocks m m"], torch.dtype]:
        """G Gᵀ of every block, summed piece by piece and over the ranks, and the dtype that products need."""
        stored = dtype
        with self._ranks.together("the Gram matrix of the gradients"):
            K = torch.zeros(self.run.count, self._m, self._m, dtype=torch.float64, device=self.device)
            for piece, G in self._stream():
                # The errors of all ranks add up: each is allowed its part.
                K[piece.blocks], dtype = self._add_gram(K[piece.blocks], G, shift / self._ranks.size, dtype)
        if self._ranks.size > 1:
            self._ranks.sum_(K)
            dtype = torch.float64 if self._auto and not float32_holds(K, shift) else stored
        return K, dtype

    def _add_gram(
        self,
        before: Float[Tensor, "blocks m m"] | None,
        G: Float[Tensor, "blocks m length"],
        shift: float,
        dtype: torch.dtype,
    ) -> tuple[Float[Tensor, "blocks m m"], torch.dtype]:
        """Adds G Gᵀ of a piece to what came before.

        It is summed in float32 while the sum so far is small beside the damping, and in float64 from then on: so one
        pass is enough, whatever comes.
        """
        K = self._scaled_gram(products.gram(G, dtype).to(self.device))
        K = K if before is None else K.add_(before)
        if dtype == torch.float32 and self._auto:
            return (K, dtype) if float32_holds(K, shift) else self._add_gram(before, G, shift, torch.float64)
        if not bool(torch.isfinite(K.diagonal(dim1=1, dim2=2)).all()):
            self._pages.raise_for_rows()
        return K, dtype

    def _project(self, x: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "blocks m *k"]:
        """G x, over all ranks."""
        p = torch.zeros(self.run.count, self._m, *x.shape[1:], dtype=torch.float64, device=x.device)
        for piece, G in self._stream():
            part = piece.split(x[self._local(piece)]).to(G.device)
            p[piece.blocks] += products.project(G, part, dtype).to(x.device)
        return self._ranks.sum_(p)

    def _coefficients(self, p: Float[Tensor, "blocks m *k"], blocks: slice) -> Float[Tensor, "blocks m *k"]:
        """S⁻¹ p, with the rows' scale on both sides."""
        if self._whitened:
            return p
        return self._scaled(woodbury.solve(self._L[blocks], self._scaled(p)))

    def _scaled(self, p: Float[Tensor, "blocks m *k"]) -> Float[Tensor, "blocks m *k"]:
        if self._scale is None:
            return p
        return p * (self._scale if p.ndim == 3 else self._scale[:, 0])

    def _scaled_gram(self, K: Float[Tensor, "blocks m m"]) -> Float[Tensor, "blocks m m"]:
        return K if self._scale is None else K * (self._scale * self._scale.T)

    def _whitening(self, blocks: slice) -> Float[Tensor, "blocks m m"]:
        """What makes W of G."""
        Linv = woodbury.inverse_factor(self._L[blocks])
        return Linv if self._scale is None else Linv * self._scale.T

    def _stream_diagonal(self) -> Float[Tensor, " n"]:
        out = torch.empty(self.run.stop - self.run.start, dtype=torch.float64, device=self._L.device)
        squares_of = self._squares_of_pieces()
        for piece, G in self._stream():
            squares, fisher = squares_of(piece, G)
            out[self._local(piece)] = woodbury.inverse_diagonal(
                squares, fisher + self._damping, self._damping
            ).flatten()
        return out

    def _squares_of_pieces(self) -> Callable[[Piece, Tensor], tuple[Tensor, Tensor]]:
        """What gives the column sums of W² and the diagonal of F − λI, for a piece of G, or of W where G was."""
        Linv = None if self._whitened or self._whole_blocks else self._whitening(slice(None))

        def of_whitened(piece: Piece, W: Tensor) -> tuple[Tensor, Tensor]:
            fisher, squares = self._squares(self._L[piece.blocks], W, None)  # L W has G's columns again
            return squares, fisher / self._m

        def of_gradients(piece: Piece, G: Tensor) -> tuple[Tensor, Tensor]:
            lower = self._whitening(piece.blocks) if Linv is None else Linv[piece.blocks]
            squares, fisher = self._squares(lower, G, self._weights)
            return squares, fisher / self._m if self._weights is None else fisher

        return of_whitened if self._whitened else of_gradients

    def _squares(
        self, lower: Float[Tensor, "blocks m m"], X: Float[Tensor, "blocks m n"], weights: Float[Tensor, " m"] | None
    ) -> tuple[Float[Tensor, "blocks n"], Float[Tensor, "blocks n"]]:
        """Column sums of (L X)², and of X² with the weights."""
        lower, weights = lower.to(X.device), None if weights is None else weights.to(X.device)
        return products.whitened_squares(lower, X, self._dtype), products.column_squares(X, weights, self._dtype)

    def _whitened_columns(self, index: Int[Tensor, " n"], block: Int[Tensor, " n"]) -> Float[Tensor, "n m"]:
        columns = self._pages.gather(index + self.run.start).double()
        if self._whitened:
            return columns.T
        if self._scale is not None:
            columns = columns * self._scale
        if self.run.count == 1:
            return woodbury.half_solve(self._L[0], columns).T
        return woodbury.half_solve(self._L[block], columns.T)

    def _whiten(self) -> None:
        """W over G, in G's memory."""
        self._multiply_rows(self._whitening(slice(None)))
        self._whitened = True

    def _multiply_rows(self, lower: Float[Tensor, "blocks m m"]) -> None:
        for piece, G in self._stream():
            products.whiten_(lower[piece.blocks].to(G.device), G, self._dtype)
            self._pages.accept_changes()

    def _stream(self) -> Iterator[tuple[Piece, Float[Tensor, "blocks m length"]]]:
        return self._pages.stream(self.run.pieces(self._columns))

    def _local(self, piece: Piece) -> slice:
        return slice(piece.start - self.run.start, piece.stop - self.run.start)

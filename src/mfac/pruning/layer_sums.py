"""What a layer's inputs and output gradients sum up to, and the blocks of F over the inputs of each output."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac import products
from mfac.dual import DualBlocks
from mfac.inverse_fisher import Ranks
from mfac.pages import BLOCK_PIECE, WIDE_PIECE, BlockRun, Pages
from mfac.primal import PrimalBlocks
from mfac.pruning.curvature import PlacedBlocks
from mfac.pruning.kronecker import KroneckerBlocks, diagonal_of
from mfac.pruning.weights import LayerCall, Weight

WIDEST = 1 << 13  # inputs or outputs of a layer whose factors have eigenvectors
PRIOR = 0.5  # of F is the Kronecker prior, if there is one
CLUSTERS = 512  # of tokens in a layer are enough
CLUSTER_BYTES = 1 << 28  # in the sums of a layer's clusters, which wide layers have fewer of
WAITING = 16  # tokens for each cluster are summed together
ROWS_AT_ONCE = 256  # are multiplied together, if blocks are not smaller


class Prior:
    """K-FAC's S ⊗ A, from the output gradients and the inputs of a layer: a share of F that also joins outputs.

    In wide layers it is all of F, and with very many outputs S is its diagonal. A has one more row and column, of
    zeros, for places without a weight.
    """

    def __init__(self, shape: torch.Size, device: torch.device, share: float = PRIOR):
        outputs, inputs = shape
        self.share, joined = share, share < 1 or outputs <= WIDEST
        self.S = torch.zeros((outputs,) * (1 + joined), dtype=torch.float64, device=device)
        self.A = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
        self.positions = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, calls: Sequence[LayerCall], root: float) -> None:
        for call in calls:
            S, A, count = call.moments(self.S.ndim > 1)
            self.S += S * root**2
            self.A[:-1, :-1] += A
            self.positions += count

    def finish(self, divisor: float, ranks: Ranks) -> None:
        """The share of F: S takes the factors."""
        self.S = ranks.sum_(self.S) * (self.share / divisor)
        self.A = ranks.sum_(self.A) / ranks.sum_(self.positions).clamp_min(1)
        if self.share < 1:
            self._others = self.S - self.S.diagonal().diag()

    @property
    def diagonal(self) -> Float[Tensor, "outputs inputs"]:
        return diagonal_of(self.S)[:, None] * self.A.diagonal()[:-1]

    def mix_(self, K: Float[Tensor, "outputs kept kept"], part: "Part") -> None:
        """(1 − α) K + α S_oo A for each output."""
        K.mul_(1 - self.share)
        own = self.S.diagonal()[part.outputs]
        for some in part.slices():
            inside = part.inside[some]
            K[some] += self.A[inside[:, :, None], inside[:, None, :]] * own[some, None, None]

    def couple(self, part: "Part", x: Float[Tensor, "outputs kept"]) -> Float[Tensor, "outputs kept"]:
        """α S_oo' A x_o', summed over the other outputs o'."""
        X = x.new_zeros(len(x), len(self.A)).scatter_(1, part.inside, x)
        return (self._others @ X @ self.A).gather(1, part.inside)


class TokenSums:
    """H_o = Σ_t δ_to² a_t a_tᵀ of each output o of a layer over tokens, which are clustered by their output gradients.

    H_o = Σ_g c_og A_g, where A_g = Σ ‖δ_t‖² a_t a_tᵀ over the tokens of a cluster, and c_og is the share of o in their
    ‖δ_t‖². That is exact if the δ_t² of a cluster are proportional, as they are while every token is a cluster of its
    own. An output costs a product with some hundred A_g, where its own sum would cost one with all tokens. The centers
    are among the first tokens; the others join the one whose |δ| has the smallest angle to theirs.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        outputs, inputs = shape
        count = self.num_bytes(shape) // (4 * (inputs + 1) ** 2)
        self._A = torch.zeros(count, inputs + 1, inputs + 1, dtype=dtype, device=device)
        self._squares = torch.zeros(count, outputs, dtype=torch.float64, device=device)
        self._centers = torch.empty(0, outputs, dtype=dtype, device=device)
        self._waiting: list[tuple[Int[Tensor, " n"], Float[Tensor, "n inputs"]]] = []

    @staticmethod
    def num_bytes(shape: torch.Size) -> int:
        each = 4 * (shape[1] + 1) ** 2
        return each * max(1, min(CLUSTERS, CLUSTER_BYTES // each))

    def add(self, a: Float[Tensor, "n inputs"], dy: Float[Tensor, "n outputs"]) -> None:
        sizes = dy.norm(dim=1)
        units = dy.abs() / sizes.clamp_min(torch.finfo(dy.dtype).tiny)[:, None]
        self._find_centers(units, (sizes * a.norm(dim=1)).square())
        own = (units @ self._centers.T).argmax(1)
        self._squares.index_add_(0, own, dy.double().square())
        self._waiting.append((own, a * sizes[:, None]))
        if sum(len(rows) for _, rows in self._waiting) >= WAITING * len(self._A):
            self._sum_up()

    def _find_centers(self, units: Float[Tensor, "n outputs"], weights: Float[Tensor, " n"]) -> None:
        """While there is room: each time the largest token that is far from all centers."""
        similar = (units @ self._centers.T).amax(1) if len(self._centers) else torch.zeros_like(weights)
        for _ in range(min(len(self._A) - len(self._centers), len(units))):
            center = units[(weights * (1 - similar)).argmax()]
            similar = torch.maximum(similar, units @ center)
            self._centers = torch.cat((self._centers, center[None]))

    def _sum_up(self) -> None:
        own, rows = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        counts = torch.bincount(own, minlength=len(self._A)).tolist()
        for A, some in zip(self._A, rows[own.argsort()].split(counts), strict=True):
            if len(some):
                A[:-1, :-1].addmm_(some.T, some)
        self._waiting = []

    def blocks(self, part: "Part") -> Float[Tensor, "outputs kept kept"]:
        if self._waiting:
            self._sum_up()
        inside, n = part.inside, self._A.shape[1]
        total = self._squares.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        shares = (self._squares / total).T[part.outputs].to(self._A.dtype)
        K = torch.empty(*inside.shape, inside.shape[1], dtype=torch.float64, device=inside.device)
        step = max(1, WIDE_PIECE // n**2)
        for some in (slice(i, i + step) for i in range(0, len(K), step)):
            whole = (shares[some] @ self._A.flatten(1)).view(-1, n, n)
            at = inside[some]
            K[some] = whole[torch.arange(len(at), device=at.device)[:, None, None], at[:, :, None], at[:, None, :]]
        return K


class Known(NamedTuple):
    """What a pass over the batches tells of a weight, besides the rows or sums that its parts hold themselves."""

    damping: float
    divisor: float
    prior: Prior | None
    tokens: TokenSums | None


class Part:
    """Some outputs of a weight, whose matrices are held at once.

    `index` has the place of each weight among all `d` kept ones, a row for each output, and d for removed ones.
    `inside` are the inputs of the kept weights, one more than there are for places without a weight.
    """

    def __init__(self, weight: Weight, index: Int[Tensor, "outputs inputs"], d: int, outputs: slice, joined: bool):
        self.weight, self.outputs, self.joined = weight, outputs, joined
        kept = int((index < d).sum(1).max())
        index = index[outputs]
        order = (index == d).to(torch.uint8).argsort(dim=1, stable=True)[:, :kept]
        places = index.gather(1, order)
        self.places: Int[Tensor, " n"] = places.flatten()
        self.inside = torch.where(places < d, order, index.shape[1])
        self.whole = kept == index.shape[1] and bool((places < d).all())
        self._sums: Tensor | None = None
        self._rows, self._filled, self._summed = torch.empty(0), 0, True

    def slices(self) -> Iterator[slice]:
        """Outputs whose blocks stay in cache."""
        count, kept = self.inside.shape
        step = max(1, BLOCK_PIECE // kept**2)
        return (slice(first, min(first + step, count)) for first in range(0, count, step))

    def start(self, rows: float, dtype: torch.dtype, device: torch.device) -> None:
        """Begins with nothing; `rows` will come, which are kept if they are fewer than the weights of a block."""
        count, kept = self.inside.shape
        at_once = int(rows) if rows < kept else min(ROWS_AT_ONCE, kept)
        self._rows, self._filled = torch.empty(at_once, count, kept, dtype=dtype, device=device), 0
        self._sums, self._summed = None, rows >= kept

    def add(self, G: Float[Tensor, "rows outputs inputs"]) -> None:
        """Adds rows of the whole weight, of which it takes what it needs."""
        first, G = 0, G if self.whole else F.pad(G, (0, 1))
        while first < len(G):
            if self._filled == len(self._rows):
                self._sum_up()
            X = G[first : first + len(self._rows) - self._filled, self.outputs]
            picked = X if self.whole else X.gather(2, self.inside.expand(len(X), -1, -1))
            self._rows[self._filled : self._filled + len(X)] = picked
            self._filled, first = self._filled + len(X), first + len(X)

    def blocks(self, known: Known, ranks: Ranks) -> PlacedBlocks:
        """The blocks of λI + Σ g gᵀ/divisor, which is mixed with a prior; the part's own sums are used up."""
        count, kept = self.inside.shape
        run, prior = BlockRun(0, kept, count), known.prior
        if prior is not None and prior.share == 1:
            blocks = KroneckerBlocks(prior.S, prior.A[:-1, :-1], self.inside, known.damping)
            return PlacedBlocks(blocks, self.places)
        if self._sums is None and not self._summed:
            rows, self._rows = self._rows[: self._filled], torch.empty(0)
            rows.mul_((self._filled / known.divisor) ** 0.5)
            return PlacedBlocks(DualBlocks(run, Pages(rows.flatten(1), rows.device), known.damping), self.places)
        K = self._sum_up() if known.tokens is None else known.tokens.blocks(self)
        K, self._sums, self._rows = ranks.sum_(K).div_(known.divisor), None, torch.empty(0)
        if prior is not None:
            prior.mix_(K, self)
        couple = partial(prior.couple, self) if prior is not None and self.joined else None
        return PlacedBlocks(PrimalBlocks.from_sums(run, K, known.damping), self.places, couple)

    def _sum_up(self) -> Float[Tensor, "outputs kept kept"]:
        """Adds the products of the rows to the sums, which makes room for others."""
        X = self._rows[: self._filled].permute(1, 2, 0)
        if self._sums is None:
            self._sums = torch.zeros(*X.shape[:2], X.shape[1], dtype=torch.float64, device=X.device)
        for some in self.slices():
            self._sums[some] += products.gram(X[some], X.dtype)
        self._filled = 0
        return self._sums

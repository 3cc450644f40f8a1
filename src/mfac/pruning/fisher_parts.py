"""Runs of Fisher blocks that weights are removed from: small ones and large ones of rows, and sums without rows."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mfac import products, woodbury
from mfac.blocks import Piece, Run
from mfac.columns import Ranks
from mfac.pages import Pages
from mfac.precision import float32_holds
from mfac.pruning.removal import group_costs, primal_removal
from mfac.pruning.slices import block_group_costs, members

# Numbers that are worked on at once: pieces of many small blocks stay in cache, those of one large block are wide.
BLOCK_PIECE = 1 << 20
WIDE_PIECE = 1 << 24

Removal = tuple[Float[Tensor, " n"], Float[Tensor, ""]]


class SmallBlocks:
    """Blocks that are loaded whole: G_b of some of them at a time, in the dual or, from m >= B on, in the primal.

    Args:
        run: where the blocks lie.
        pages: where G is.
        damping: λ.
    """

    def __init__(self, run: Run, pages: Pages, damping: float):
        self.run = run
        self.damping = damping
        self._pages = pages
        self._m = pages.shape[0]
        numbers = self._m * run.length if run.length > self._m else max(self._m, run.length) * run.length
        self._step = run.length * max(1, BLOCK_PIECE // numbers)

    def joint_removal(self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]) -> Removal:
        """The change that removes the weights, and ½ δᵀFδ."""
        deltas, costs = [], []
        for piece, G in self._pages.stream(self.run.pieces(self._step)):
            local = _local(self.run, piece)
            parts = piece.split(theta[local]), piece.split(removed[local])
            if self.run.length <= self._m:
                delta, cost = primal_removal(self._fisher(G), *parts)
            else:
                delta, cost = woodbury.joint_removal(G, *parts, self.damping)
            deltas.append(delta.flatten())
            costs.append(cost.sum())
        return torch.cat(deltas), torch.stack(costs).sum()

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        total = self.damping * delta.square().sum()
        for piece, G in self._pages.stream(self.run.pieces(self._step)):
            part = piece.split(delta[_local(self.run, piece)])
            total = total + products.project(G, part, torch.float64).square().sum() / self._m
        return total / 2

    def inverses(self) -> Iterator[tuple[Piece, Float[Tensor, "blocks b b"]]]:
        """F⁻¹ of the blocks, dense, some at a time."""
        for piece, G in self._pages.stream(self.run.pieces(self._step)):
            yield piece, woodbury.primal_inverse(self._fisher(G), 0.0)[0]

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of pairs that lie in one block each, counted from the run's start."""
        return _elements(self.run, self.inverses(), rows, columns)

    def add_group_costs(
        self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], out: Float[Tensor, " groups"]
    ) -> None:
        """Adds ½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of every group."""
        for piece, G in self._pages.stream(self.run.pieces(self._step)):
            local = _local(self.run, piece)
            block_group_costs(G, piece.split(theta[local]), piece.split(ids[local]), self.damping, out)

    def _fisher(self, G: Float[Tensor, "blocks m b"]) -> Float[Tensor, "blocks b b"]:
        F = products.gram(G.transpose(1, 2), torch.float64).div_(self._m)
        F.diagonal(dim1=1, dim2=2).add_(self.damping)
        return F


class LargeBlocks:
    """Blocks of which only slices fit at a time, the full matrix among them: two passes over G, and m x m algebra.

    Args:
        run: where the blocks lie.
        pages: where G is.
        damping: λ.
        ranks: that share the only block of the run, each with some of its columns; costs are those of all ranks.
    """

    def __init__(self, run: Run, pages: Pages, damping: float, ranks: Ranks | None = None):
        self.run = run
        self.damping = damping
        self._ranks = Ranks() if ranks is None else ranks
        self._pages = pages
        self._m = pages.shape[0]
        self._step = max(1, WIDE_PIECE // self._m)

    def joint_removal(self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]) -> Removal:
        """The change that removes the weights, and ½ δᵀFδ."""
        gone = torch.where(removed, theta, 0.0)
        u = self._project(gone)
        a = woodbury.removal_coefficients(self._kept_gram(removed), u, self._m * self.damping)
        delta = torch.empty_like(theta)
        for piece, G in self._stream():
            local = _local(self.run, piece)
            delta[local] = products.combine(G, a[piece.blocks], torch.float64).flatten()
        squares = self._ranks.sum_(gone.square().sum())
        cost = 0.5 * self.damping * (squares + (u * a).sum())
        return torch.where(removed, -theta, delta), cost

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        squares = self._ranks.sum_(delta.square().sum())
        return (self.damping * squares + self._project(delta).square().sum() / self._m) / 2

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij = (δ_ij − W_iᵀW_j)/λ of pairs that lie in one block each, counted from the run's start."""
        K = self._kept_gram(torch.zeros(self.run.stop - self.run.start, dtype=torch.bool, device=rows.device))
        L = woodbury.factor(K, self._m * self.damping, overwrite=True)
        out = (rows == columns).double()
        for block in range(self.run.count):
            inside = (rows // self.run.length == block).nonzero()[:, 0]
            for part in inside.split(max(1, self._step // 2)):
                # Pairs of one group share their weights: each column is whitened once.
                wanted, places = torch.stack((rows[part], columns[part])).unique(return_inverse=True)
                W = woodbury.half_solve(L[block], self._pages.gather(wanted + self.run.start).double())
                out[part] -= (W[:, places[0]] * W[:, places[1]]).sum(0)
        return out / self.damping

    def add_group_costs(
        self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], out: Float[Tensor, " groups"]
    ) -> None:
        """Adds ½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q of every group."""
        K = self._kept_gram(torch.zeros_like(ids, dtype=torch.bool))
        for block in range(self.run.count):
            first = block * self.run.length
            for group, columns in members(ids[first : first + self.run.length]):
                G_Q = self._pages.gather(columns + self.run.start + first).double()
                out[group] += group_costs(K[block], G_Q, theta[columns + first], self.damping)

    def _project(self, x: Float[Tensor, " n"]) -> Float[Tensor, "blocks m"]:
        out = x.new_zeros(self.run.count, self._m)
        with self._ranks.together("a product with the gradients"):
            for piece, G in self._stream():
                out[piece.blocks] += products.project(G, piece.split(x[_local(self.run, piece)]), torch.float64)
        return self._ranks.sum_(out)

    def _kept_gram(self, removed: Bool[Tensor, " n"]) -> Float[Tensor, "blocks m m"]:
        """G_R G_Rᵀ, in float32 where that is safe."""
        if self._pages.dtype != torch.float64:
            K = self._sum_grams(removed, torch.float32)
            if float32_holds(K, self._m * self.damping):
                return K
        return self._sum_grams(removed, torch.float64)

    def _sum_grams(self, removed: Bool[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "blocks m m"]:
        with self._ranks.together("the Gram matrix of the weights that stay"):
            K = torch.zeros(self.run.count, self._m, self._m, dtype=torch.float64, device=removed.device)
            for piece, G in self._stream():
                kept = (~removed[_local(self.run, piece)]).nonzero()[:, 0]
                K[piece.blocks] += products.gram(G[:, :, kept], dtype)
        return self._ranks.sum_(K)

    def _stream(self) -> Iterator[tuple[Piece, Tensor]]:
        # Slices of one block at a time: a piece of several would mix their columns in `_sum_grams`.
        return self._pages.stream(self.run.pieces(min(self._step, max(1, self.run.length - 1))))


class SummedBlocks:
    """Blocks whose Fisher matrices are there, the rows gone."""

    def __init__(self, run: Run, fisher: Float[Tensor, "blocks b b"], damping: float):
        self.run = run
        self.damping = damping
        self._fisher = fisher
        self._step = max(1, BLOCK_PIECE // run.length**2)

    def joint_removal(self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]) -> Removal:
        """The change that removes the weights, and ½ δᵀFδ."""
        shape = (self.run.count, self.run.length)
        parts = zip(
            self._fisher.split(self._step),
            theta.view(shape).split(self._step),
            removed.view(shape).split(self._step),
            strict=True,
        )
        results = [primal_removal(self._damped(F), t, r) for F, t, r in parts]
        return torch.cat([delta.flatten() for delta, _ in results]), torch.cat([cost for _, cost in results]).sum()

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        blocks = delta.view(self.run.count, self.run.length)
        return (self.damping * delta.square().sum() + torch.einsum("bi,bij,bj->", blocks, self._fisher, blocks)) / 2

    def inverses(self) -> Iterator[tuple[Piece, Float[Tensor, "blocks b b"]]]:
        """F⁻¹ of the blocks, dense, some at a time."""
        for piece in self.run.pieces(self._step * self.run.length):
            yield piece, woodbury.primal_inverse(self._fisher[piece.blocks], self.damping)[0]

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of pairs that lie in one block each, counted from the run's start."""
        return _elements(self.run, self.inverses(), rows, columns)

    def _damped(self, F: Float[Tensor, "blocks b b"]) -> Float[Tensor, "blocks b b"]:
        F = F.clone()
        F.diagonal(dim1=1, dim2=2).add_(self.damping)
        return F


def _elements(
    run: Run,
    inverses: Iterator[tuple[Piece, Float[Tensor, "blocks b b"]]],
    rows: Int[Tensor, " n"],
    columns: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """The elements of pairs, looked up in dense blocks as these come by."""
    block = rows // run.length
    order = block.argsort()
    ends = [0, *torch.bincount(block, minlength=run.count).cumsum(0).tolist()]
    out = torch.empty(len(rows), dtype=torch.float64, device=rows.device)
    for piece, inverse in inverses:
        here = order[ends[piece.first] : ends[piece.last]]
        out[here] = inverse[block[here] - piece.first, rows[here] % run.length, columns[here] % run.length]
    return out


def _local(run: Run, piece: Piece) -> slice:
    """Where a piece lies, counted from the run's start."""
    return slice(piece.start - run.start, piece.stop - run.start)

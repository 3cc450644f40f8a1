"""F of layers that are too wide for a matrix for each output: K-FAC's form, by its eigenvectors."""

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac import precision as judge
from mfac import primal, products, woodbury
from mfac.pages import BLOCK_PIECE, BlockRun


class KroneckerBlocks:
    """F = λI + S ⊗ A of a whole layer, where S = U s Uᵀ and A = V a Vᵀ; an output's weights are a block.

    S can be its diagonal alone, where there are too many outputs for their eigenvectors; U is I then.
    `inside` are the inputs of the kept weights, one more than there are for places without a weight. F⁻¹ is that of the
    dense layer, as if removed weights could still move; only the joint removal knows that they cannot.
    """

    def __init__(
        self, S: Tensor, A: Float[Tensor, "inputs inputs"],
        inside: Int[Tensor, "outputs kept"], damping: float,
    ):  # fmt: skip
        self.run = BlockRun(0, inside.shape[1], len(inside))
        self._S, self._A, self._inside, self._damping = S, A, inside, damping
        self._present = inside < len(A)
        self._U: Tensor
        s, self._U = torch.linalg.eigh(S) if S.ndim > 1 else (S, torch.ones_like(S))
        a, V = torch.linalg.eigh(A)
        scales = s.clamp_min(0)[:, None] * a.clamp_min(0)
        judge.check_promise(judge.EPS64 * scales.amax()[None] / damping, scales.amax()[None, None], damping)
        self._inverse = (scales + damping).reciprocal()
        self._V = F.pad(V, (0, 0, 0, 1))  # no weight, no eigenvector

    def apply(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        V, Ut = self._V[:-1], self._U.T if self._U.ndim > 1 else self._U
        return self._kept(by(self._U, self._inverse * by(Ut, self._spread(x) @ V)) @ V.T).flatten()

    def forward(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """F x."""
        return self._kept(by(self._S, self._spread(x)) @ self._A).flatten() + self._damping * x

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        return (delta @ self.forward(delta)) / 2

    def diagonal(self) -> Float[Tensor, " n"]:
        diagonal = self._kept(self._own @ self._V[:-1].square().T)
        return diagonal.masked_fill_(~self._present, 1 / self._damping).flatten()

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """δ = −θ on the removed weights and F_RR⁻¹ F_RQ θ_Q on the kept ones, and ½ δᵀFδ.

        Preconditioned by F's diagonal: F⁻¹ saves a third of the iterations, and makes each three times as long.
        """
        scales = diagonal_of(self._S)[:, None] * self._A.diagonal()
        diagonal = self._kept(scales).flatten() + self._damping
        return woodbury.iterated_removal(self.forward, lambda r: r / diagonal, theta, removed)

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries of the same output; zero of others."""

        def whitened(blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k inputs q"]:
            V = self._V[self._inside[blocks].gather(1, places)]
            return (V * self._own[blocks, None].sqrt()).mT

        return products.pair_products(rows, columns, self.run.length, max(1, BLOCK_PIECE // len(self._A)), whitened)

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        """What F⁻¹ has for each output, dense, some outputs at a time."""
        step = max(1, BLOCK_PIECE // len(self._A) ** 2)
        for some in (slice(i, i + step) for i in range(0, self.run.count, step)):
            V = self._V[self._inside[some]]
            inverse = V * self._own[some, None] @ V.mT
            inverse.diagonal(dim1=1, dim2=2).add_((~self._present[some]).double() / self._damping)
            yield some, inverse

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        return primal.group_costs(self.run, self.inverses(), theta, ids, count)

    @cached_property
    def _own(self) -> Float[Tensor, "outputs inputs"]:
        """What F⁻¹ has for each output, in the eigenvectors of A: where it is diagonal."""
        return by(self._U.square(), self._inverse)

    def _spread(self, x: Float[Tensor, " n"]) -> Float[Tensor, "outputs inputs"]:
        X = x.new_zeros(self.run.count, len(self._V))
        return X.scatter_(1, self._inside, x.view_as(self._inside))[:, :-1]

    def _kept(self, X: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs kept"]:
        return F.pad(X, (0, 1)).gather(1, self._inside)


def by(S: Tensor, X: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """S X, of a matrix or the diagonal of one."""
    return S @ X if S.ndim > 1 else S[:, None] * X


def diagonal_of(S: Tensor) -> Float[Tensor, " outputs"]:
    """Of a matrix, or of its diagonal itself."""
    return S.diagonal() if S.ndim > 1 else S

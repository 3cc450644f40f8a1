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

ITERATED = torch.float32  # what removals are iterated in


class KroneckerBlocks:
    """F = λI + S ⊗ A of a whole layer, where S = U s Uᵀ and A = V a Vᵀ; an output's weights are a block.

    S can be its diagonal alone, where there are too many outputs for their eigenvectors; U is I then.
    `inside` are the inputs of the kept weights, one more than there are for places without a weight. F⁻¹ is that of the
    dense layer, as if removed weights could still move; only the joint removal knows that they cannot.
    """

    def __init__(
        self, S: Tensor, A: Float[Tensor, "inputs inputs"], inside: Int[Tensor, "outputs kept"], damping: float
    ):
        self.run = BlockRun(0, inside.shape[1], len(inside))
        self._S, self._A, self._inside, self._damping = S, A, inside, damping
        self._present = inside < len(A)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor, Float[Tensor, "outputs inputs"]]:
        """U, V, and the eigenvalues of F⁻¹ of the dense layer; V has a row of zeros for no weight."""
        U: Tensor
        s, U = torch.linalg.eigh(self._S) if self._S.ndim > 1 else (self._S, torch.ones_like(self._S))
        a, V = torch.linalg.eigh(self._A)
        scales = s.clamp_min(0)[:, None] * a.clamp_min(0)
        judge.check_promise(judge.EPS64 * scales.amax()[None] / self._damping, scales.amax()[None, None], self._damping)
        return U, F.pad(V, (0, 0, 0, 1)), (scales + self._damping).reciprocal()

    def apply(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        U, V, inverse = self._eigen
        Ut, V = U.T if U.ndim > 1 else U, V[:-1]
        return self._kept(by(U, inverse * by(Ut, self._spread(x) @ V)) @ V.T).flatten()

    def forward(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """F x."""
        return self._product(self._S, self._A, x) + self._damping * x

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """½ δᵀFδ."""
        return (delta @ self.forward(delta)) / 2

    def diagonal(self) -> Float[Tensor, " n"]:
        diagonal = self._kept(self._own @ self._eigen[1][:-1].square().T)
        return diagonal.masked_fill_(~self._present, 1 / self._damping).flatten()

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        """δ = −θ on the removed weights and F_RR⁻¹ F_RQ θ_Q on the kept ones, and ½ δᵀFδ.

        By F/λ and θ of size 1 in float32, which is enough for the iterations. They are preconditioned by the diagonal:
        F⁻¹ saves a third of them, and makes each three times as long.
        """
        tiny = torch.finfo(torch.float64).tiny
        unit, size = self._A.diagonal().mean().clamp_min(tiny), theta.abs().amax().clamp_min(tiny)
        S, A = (self._S * (unit / self._damping)).to(ITERATED), (self._A / unit).to(ITERATED)
        diagonal = self._kept(diagonal_of(S)[:, None] * A.diagonal()).flatten() + 1
        delta, _ = woodbury.iterated_removal(
            lambda x: self._product(S, A, x) + x, lambda r: r / diagonal, (theta / size).to(ITERATED), removed
        )
        delta = torch.where(removed, -theta, delta * size)
        return delta, self.cost(delta)

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[F⁻¹]_ij of entries of the same output; zero of others."""

        def whitened(blocks: Int[Tensor, " k"], places: Int[Tensor, "k q"]) -> Float[Tensor, "k inputs q"]:
            V = self._eigen[1][self._inside[blocks].gather(1, places)]
            return (V * self._own[blocks, None].sqrt()).mT

        return products.pair_products(rows, columns, self.run.length, max(1, BLOCK_PIECE // len(self._A)), whitened)

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        """What F⁻¹ has for each output, dense, some outputs at a time."""
        for some in products.spans(self.run.count, max(1, BLOCK_PIECE // len(self._A) ** 2)):
            V = self._eigen[1][self._inside[some]]
            inverse = V * self._own[some, None] @ V.mT
            inverse.diagonal(dim1=1, dim2=2).add_((~self._present[some]).double() / self._damping)
            yield some, inverse

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        return primal.group_costs(self.run, self.inverses(), theta, ids, count)

    @cached_property
    def _own(self) -> Float[Tensor, "outputs inputs"]:
        """What F⁻¹ has for each output, in the eigenvectors of A: where it is diagonal."""
        U, _, inverse = self._eigen
        return by(U.square(), inverse)

    def _product(self, S: Tensor, A: Float[Tensor, "inputs inputs"], x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return self._kept(by(S, self._spread(x)) @ A).flatten()

    def _spread(self, x: Float[Tensor, " n"]) -> Float[Tensor, "outputs inputs"]:
        X = x.new_zeros(self.run.count, len(self._A) + 1)
        return X.scatter_(1, self._inside, x.view_as(self._inside))[:, :-1]

    def _kept(self, X: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs kept"]:
        return F.pad(X, (0, 1)).gather(1, self._inside)


def by(S: Tensor, X: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
    """S X, of a matrix or the diagonal of one."""
    return S @ X if S.ndim > 1 else S[:, None] * X


def diagonal_of(S: Tensor) -> Float[Tensor, " outputs"]:
    """Of a matrix, or of its diagonal itself."""
    return S.diagonal() if S.ndim > 1 else S

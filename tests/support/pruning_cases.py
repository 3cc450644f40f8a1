"""Small problems for pruning: a loss that is exactly quadratic, and the dense answers to it."""

from collections.abc import Iterable
from typing import NamedTuple

import oracle
import torch
from cases import spans
from torch import Tensor, nn

import mfac

DAMPING = 1e-2
PAPER = {"fisher": "empirical", "damping": 1e-5, "update": "joint", "recalibrate": False}
SIZES = (12, 20)  # of the two tensors: 3 x 4 and 4 x 5


class Quadratic(nn.Module):
    """Two weights; the loss sees them as one vector."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(4, 5, generator=generator, dtype=torch.float64))

    def vector(self) -> Tensor:
        return torch.cat([self.first.flatten(), self.second.flatten()])


class Problem(NamedTuple):
    """A model at the minimum θ* of its loss, whose batches have the gradients ±g and whose Hessian is F."""

    model: Quadratic
    loss_fn: object
    batches: list[Tensor]
    rows: Tensor
    F: Tensor
    theta: Tensor


def blocks_of(block_size: int | None) -> list[tuple[int, int]]:
    return [(0, sum(SIZES))] if block_size is None else spans(SIZES, block_size)


def quadratic(num_grads: int = 8, block_size: int | None = None, seed: int = 0) -> Problem:
    """Pairs of batches with the gradients g and −g: their mean is zero, their Fisher matrix is the Hessian."""
    model = Quadratic(seed)
    half = torch.randn(num_grads // 2, 32, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    rows = torch.stack([half, -half], 1).flatten(0, 1)
    theta = model.vector().detach().clone()
    F = torch.from_numpy(oracle.fisher(rows, DAMPING, blocks=blocks_of(block_size)).astype(float))

    def loss_fn(model: Quadratic, g: Tensor) -> Tensor:
        change = model.vector() - theta
        return 3.0 + g @ change + 0.5 * change @ F @ change

    return Problem(model, loss_fn, list(rows), rows, F, theta)


def dense_joint(F: Tensor, theta: Tensor, removed: Tensor) -> tuple[Tensor, float]:
    """δ = −F⁻¹_:Q ([F⁻¹]_QQ)⁻¹ θ_Q and ½ θ_Qᵀ([F⁻¹]_QQ)⁻¹θ_Q, literally."""
    inverse = torch.linalg.inv(F)
    x = torch.linalg.solve(inverse[removed][:, removed], theta[removed])
    return -inverse[:, removed] @ x, 0.5 * float(theta[removed] @ x)


def dense_update(F: Tensor, theta: Tensor, removed: Tensor, update: str) -> Tensor:
    """How the weights change; obs: Σ −θ_i F⁻¹e_i/[F⁻¹]_ii over the removed ones, and exactly −θ on them."""
    if update == "joint":
        return dense_joint(F, theta, removed)[0]
    inverse, delta = torch.linalg.inv(F), torch.zeros_like(theta)
    for i in removed.nonzero()[:, 0] if update == "obs" else ():
        delta -= theta[i] * inverse[:, i] / inverse[i, i]
    return torch.where(removed, -theta, delta)


def literal_greedy(F: Tensor, theta: Tensor, candidates: Iterable[int], count: int) -> list[tuple[int, float]]:
    """Remove the cheapest candidate, invert what is left anew, remove the next: (weight, cost) in order."""
    left, theta, order, candidates = list(range(len(theta))), theta.clone(), [], set(candidates)
    for _ in range(count):
        inverse = torch.linalg.inv(F[left][:, left])
        single = theta[left].square() / (2 * inverse.diagonal())
        k = min((k for k, weight in enumerate(left) if weight in candidates), key=single.tolist().__getitem__)
        order.append((left[k], float(single[k])))
        theta[left] -= theta[left[k]] * inverse[:, k] / inverse[k, k]
        left.pop(k)
    return order


def dense_scores(F: Tensor, theta: Tensor) -> Tensor:
    return theta.square() / (2 * torch.linalg.inv(F).diagonal())


def quick(case, sparsity, batches=None, **options):
    """`mfac.prune` of a case of `models`, in a few small steps."""
    options = PAPER | {"num_grads": 4, "block_size": 8, "recomputations": 3, "progress": False} | options
    return mfac.prune(case.model, case.loss_fn, batches or [case.batch], sparsity, **options)


def solve(problem, sparsity, block_size, **options):
    """`mfac.prune` of a quadratic, in one step with all of its gradients."""
    options = PAPER | {"damping": DAMPING, "recomputations": 1, "num_grads": 8, "loss_batches": 8} | options
    return mfac.prune(problem.model, problem.loss_fn, problem.batches, sparsity, block_size=block_size, **options)


def zeros(model):
    """In weights of two or more dimensions."""
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)


def some_masks(model, seed=0):
    torch.manual_seed(seed)
    return {name: torch.rand(p.shape) > 0.5 for name, p in model.named_parameters() if p.ndim > 1}


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()
    return model, [(torch.randn(5, 2, 6, 6, dtype=torch.float64), torch.randint(3, (5,))) for _ in range(3)]


def lowest(scores, fraction):
    """The weights with the smallest scores, tensors taken together."""
    flat = torch.cat([score.flatten() for score in scores])
    gone = torch.zeros_like(flat, dtype=torch.bool)
    gone[flat.topk(round(fraction * len(flat)), largest=False).indices] = True
    parts = gone.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]

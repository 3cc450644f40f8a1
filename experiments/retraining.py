"""Small image tasks, and what retraining says of their samples: the truth that estimates of influence are held against.

Networks minimize the mean cross-entropy plus ½λ‖θ‖² by L-BFGS in float64.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from experiments import data
from experiments.datasets.images import load_mnist

TESTS, FLIPPED, CLASSES = 50, 0.1, 10
SCRATCH = Path("build/influence")  # what retraining gave, for runs that continue


@dataclass(eq=False)  # by identity, for caches
class Task:
    """Training and test images [n, pixels] with labels, a network, λ, and how many models are trained again."""

    inputs: Tensor
    labels: Tensor
    tests: tuple[Tensor, Tensor]
    hidden: int
    damping: float
    seed: int = 0
    left_out: int = 40
    subsets: int = 50

    def network(self) -> nn.Module:
        """Biases are weights of a constant input: dattri's EK-FAC mixes up those of `nn.Linear`."""
        torch.manual_seed(self.seed)
        sizes, layers = [self.inputs.shape[1], *[self.hidden] * bool(self.hidden), CLASSES], []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.ConstantPad1d((0, 1), 1.0), nn.Linear(fan_in + 1, fan_out, bias=False), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double()

    def objective(self, model: nn.Module, kept: Tensor | slice = slice(None)) -> Callable[[Tensor], Tensor]:
        """(1/N) Σ loss over the kept samples + ½λ‖θ‖² of the flat weights; N is always the number of all samples."""
        names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
        inputs, labels = self.inputs[kept].double(), self.labels[kept]

        def value(theta: Tensor) -> Tensor:
            parts = theta.split([shape.numel() for shape in shapes])
            weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
            losses = F.cross_entropy(functional_call(model, weights, inputs), labels, reduction="sum")
            return losses / len(self.inputs) + self.damping / 2 * theta.square().sum()

        return value

    def fit(
        self, kept: Tensor | slice = slice(None), start: nn.Module | None = None, factor: Tensor | None = None,
        steps: int = 1500,
    ) -> nn.Module:  # fmt: skip
        """The minimum of the objective; with the Hessian's Cholesky factor at the start it takes a few steps."""
        model = self.network() if start is None else copy.deepcopy(start)
        origin, objective = flat(model), self.objective(model, kept)
        moved = torch.zeros_like(origin, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [moved], max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-9,
            tolerance_change=1e-13,
        )  # fmt: skip

        def theta() -> Tensor:
            step = (
                moved if factor is None else torch.linalg.solve_triangular(factor.T, moved[:, None], upper=True)[:, 0]
            )
            return origin + step

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = objective(theta())
            value.backward()
            return value

        optimizer.step(closure)
        nn.utils.vector_to_parameters(theta().detach(), model.parameters())
        return model

    def factor(self, model: nn.Module) -> Tensor:
        """The Cholesky factor of the Hessian of the objective."""
        return torch.linalg.cholesky(hessian_product(self, model)(torch.eye(flat(model).numel(), dtype=torch.float64)))

    @torch.no_grad()
    def test_losses(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.tests[0].double()), self.tests[1], reduction="none")

    def flipped(self) -> tuple["Task", Tensor]:
        """The task with a tenth of its labels wrong, and which these are."""
        generator = torch.Generator().manual_seed(1 + self.seed)
        wrong = torch.rand(len(self.labels), generator=generator) < FLIPPED
        shift = torch.randint(1, CLASSES, (len(self.labels),), generator=generator)
        return replace(self, labels=torch.where(wrong, (self.labels + shift) % CLASSES, self.labels)), wrong


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def hessian_product(task: Task, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """H x for the columns of x, with H the Hessian of the objective at the model's weights."""
    slope, theta = grad(task.objective(model)), flat(model)
    return vmap(lambda v: jvp(slope, (theta,), (v,))[1], 1, 1, chunk_size=10)


def digits(seed: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """1,437 + 50 images of 8 x 8 pixels; another seed has other test images."""
    images, labels = data.digits()
    held_out = torch.arange(len(labels)) % 5 == seed
    return images[~held_out], labels[~held_out], (images[held_out][:TESTS], labels[held_out][:TESTS])


def mnist(seed: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """5,000 + 50 images, averaged down to 7 x 7 pixels; another seed has others."""
    (inputs, labels), tests = (
        (F.avg_pool2d(x.float() / 255, 4).flatten(1), y.long()) for x, y in map(load_mnist, ("train", "test"))
    )
    train, test = slice(5000 * seed, 5000 * (seed + 1)), slice(TESTS * seed, TESTS * (seed + 1))
    return inputs[train], labels[train], (tests[0][test], tests[1][test])


TASKS: dict[str, tuple[Callable[[int], Any], int, float]] = {  # images, hidden neurons, λ
    "digits, logistic regression": (digits, 0, 1e-3),
    "digits, MLP": (digits, 16, 1e-2),
    "MNIST, logistic regression": (mnist, 0, 1e-3),
    "MNIST, MLP": (mnist, 16, 1e-2),
}


def build(name: str, trial: bool = False) -> Task:
    images, hidden, damping = TASKS[name]
    return Task(*images(int(trial)), hidden, damping, int(trial), *((10, 20) if trial else (40, 50)))


def truth(name: str, trial: bool) -> dict[str, Any]:
    """What retraining says: losses without single samples, and losses of models trained on halves; kept in a file."""
    file, task = SCRATCH / f"{name}{', trial' * trial}.pt", build(name, trial)
    if file.exists():
        return torch.load(file, weights_only=True)
    model, generator = task.fit(), torch.Generator().manual_seed(2 + task.seed)
    factor, before, N = task.factor(model), task.test_losses(model), len(task.inputs)
    hardest = F.cross_entropy(model(task.inputs.double()), task.labels, reduction="none").topk(task.left_out // 2)
    samples = torch.cat([hardest.indices, torch.randperm(N, generator=generator)[: task.left_out // 2]]).unique()
    others = [torch.arange(N)[torch.arange(N) != i] for i in samples]
    changes = torch.stack([task.test_losses(task.fit(kept, model, factor)) - before for kept in others], 1)
    halves = [torch.randperm(N, generator=generator)[: N // 2] for _ in range(task.subsets)]
    start = (None, None) if task.hidden else (model, factor)
    losses = torch.stack([task.test_losses(task.fit(half, *start, steps=300)) for half in halves], 1)
    wrong = task.flipped()[0].fit()
    known = {"samples": samples, "changes": changes, "halves": torch.stack(halves), "losses": losses,
             "weights": model.state_dict(), "wrong weights": wrong.state_dict()}  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(known, file)
    return known


def trained(task: Task, weights: dict[str, Tensor]) -> nn.Module:
    model = task.network()
    model.load_state_dict(weights)
    return model.float()

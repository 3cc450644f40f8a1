"""Figure: K-FAC, with and without its balance π, against WoodFisher and M-FAC, one-shot on an MNIST network.

A fully connected network of 784, 40, 20 and 10 units (32,430 weights) is trained, and pruned in one step, all layers
together. Every method has the same batches, the same damping and the simultaneous OBS update; M-FAC has the full
matrix, WoodFisher blocks of 1,000.

Small: three networks, six sparsities: 15 minutes of one core.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mfac
from experiments import drawing
from experiments.baselines.kfac import damped_factors
from experiments.baselines.layer_moments import find_layers, layer_moments
from experiments.baselines.pruning import prune
from experiments.datasets.images import Normalisation, load_mnist
from experiments.models.mlp import MLPNET, mlp
from experiments.recipe import Recipe, Request, Results
from experiments.training import Training, cosine
from mfac.app.tasks.tensor_batches import TensorBatches

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())
PIXELS = Normalisation((0.1307,), (0.3081,))
Pruner = Callable[[nn.Module, Iterable[Any], float], None]


@dataclass(frozen=True)
class Settings:
    """How much is trained and looked at."""

    seeds: tuple[int, ...]
    steps: int
    sparsities: tuple[float, ...]
    num_grads: int
    batch_size: int = 16
    damping: float = 1e-5
    test_images: int = 10_000


SIZES = {
    "full": Settings((1, 2, 3, 4, 5), 4690, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95), 1024),
    "small": Settings((1, 2, 3), 1400, (0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 512),
    "smoke": Settings((1,), 10, (0.5,), 8, test_images=200),
}


def methods(settings: Settings) -> dict[str, Pruner]:
    """{label: pruner}, all with the same number of batches."""
    shared = {"num_grads": settings.num_grads, "damping": settings.damping, "recomputations": 1, "update": "obs",
              "loss_batches": 1, "progress": False, "seed": 1}  # fmt: skip

    def ours(model: nn.Module, batches: Iterable[Any], sparsity: float, **changes: Any) -> None:
        prune(model, LOSS, batches, sparsity, **(shared | changes))

    return {
        "magnitude": partial(ours, method="magnitude"),
        "K-FAC, without π": partial(prune_kfac, settings, balance=False),
        "K-FAC": partial(prune_kfac, settings, balance=True),
        "WoodFisher, blocks of 1000": partial(ours, method="woodfisher", block_size=1000),
        "M-FAC, full matrix": partial(ours, method="mfac", block_size=None),
    }


@torch.no_grad()
def prune_kfac(settings: Settings, model: nn.Module, batches: Iterable[Any], sparsity: float, balance: bool) -> None:
    """OBS with F = S ⊗ A in every layer: the lowest θ²/(2 [S⁻¹]_oo [A⁻¹]_jj) go, the others move by the sum of updates.

    `experiments.baselines.kronecker` is the same with the balance; only here it can be left out.
    """
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    layers = find_layers(model, weights, "kfac")
    with torch.enable_grad():
        moments = layer_moments(model, LOSS, batches, settings.num_grads, layers, backward=True)
    model.zero_grad(set_to_none=True)
    inverses = {}
    for name, found in moments.items():
        S, A = damped_factors(
            found.outputs / found.positions, found.inputs[0] / found.samples, settings.damping, balance
        )
        inverses[name] = torch.linalg.inv(S), torch.linalg.inv(A)
    diagonals = {name: torch.outer(S.diagonal(), A.diagonal()) for name, (S, A) in inverses.items()}
    scores = {name: p.double() ** 2 / (2 * diagonals[name]) for name, p in weights.items()}
    flat = torch.cat([score.flatten() for score in scores.values()])
    limit = flat.kthvalue(max(1, round(sparsity * len(flat)))).values
    for name, p in weights.items():
        removed = scores[name] <= limit
        S, A = inverses[name]
        single = torch.where(removed, p.double() / diagonals[name], 0.0)
        p.copy_(torch.where(removed, 0.0, p.double() - S @ single @ A))


def run(request: Request) -> None:
    results, settings = Results("mnist_pruning", request), SIZES[request.size]
    results.settings(**vars(settings), hidden=MLPNET)
    for seed in settings.seeds:
        todo = [label for label in methods(settings) if request.wants(label) and key(label, seed) not in results.cells]
        if not todo:
            continue
        state, dense = trained(seed, settings)
        results.cell(f"dense, seed {seed}", lambda dense=dense: {"accuracy": dense})
        for label in todo:
            results.cell(key(label, seed), lambda a=(label, seed, state): row(*a, settings))


def key(label: str, seed: int) -> str:
    return f"{label}, seed {seed}"


def trained(seed: int, settings: Settings) -> tuple[dict[str, Tensor], float]:
    """The weights of a network after a few passes over MNIST, and its accuracy."""
    torch.manual_seed(seed)
    model = mlp(MLPNET)
    batches = TensorBatches(*load_mnist("train"), 128, shuffle=True, prepare=PIXELS)
    Training(model, torch.optim.Adam(model.parameters(), 2e-3), batches, settings.steps, cosine).run()
    return model.state_dict(), accuracy(model.eval(), settings.test_images)


def row(label: str, seed: int, state: dict[str, Tensor], settings: Settings) -> dict[str, Any]:
    """One method at every sparsity, each from the dense network."""
    found = {}
    for sparsity in settings.sparsities:
        torch.manual_seed(seed)
        model = mlp(MLPNET).eval()
        model.load_state_dict(state)
        batches = TensorBatches(*load_mnist("train"), settings.batch_size, shuffle=True, prepare=PIXELS)
        methods(settings)[label](model, batches, sparsity)
        found[f"{sparsity:g}"] = accuracy(model, settings.test_images)
    print(f"  {label}: {found}", flush=True)
    return {"accuracy": found}


@torch.no_grad()
def accuracy(model: nn.Module, count: int) -> float:
    """Per cent of the first `count` test images."""
    images, labels = (part[:count] for part in load_mnist("test"))
    return round(100 * float((model(PIXELS(images)).argmax(1) == labels).double().mean()), 3)


def plot(request: Request) -> Path:
    results, settings = Results("mnist_pruning", request), SIZES[request.size]
    curves = {}
    for label in methods(settings):
        rows = [cell["accuracy"] for name, cell in results.cells.items() if name.startswith(f"{label}, seed")]
        if rows:
            means = [sum(r[f"{s:g}"] for r in rows) / len(rows) for s in settings.sparsities]
            curves[label] = ([100 * s for s in settings.sparsities], means)
            print(
                f"{label}: "
                + ", ".join(f"{100 * s:g} % {v:.2f}" for s, v in zip(settings.sparsities, means, strict=True))
            )
    return drawing.lines(
        results.picture(), curves, x="sparsity, %", y="test accuracy, %",
        title="784-40-20-10 on MNIST, pruned in one step, no fine-tuning",
    )  # fmt: skip


RECIPE = Recipe("mnist_pruning", "K-FAC, WoodFisher and M-FAC on an MNIST network (figure)", run, plot, minutes=8)

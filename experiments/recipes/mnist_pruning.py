"""Figure: K-FAC, with and without its balance π, against WoodFisher and M-FAC, one-shot on an MNIST network.

A fully connected network of 784, 40, 20 and 10 units (32,430 weights) is trained, and pruned in one step, all layers
together. Every method has the same batches, the same damping and the simultaneous OBS update; M-FAC has the full
matrix, WoodFisher blocks of 1,000.

Three networks, six sparsities: 15 minutes of one core.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.data import ImageBatches, make_test
from experiments.datasets.images import load_mnist
from experiments.models.mlp import MLPNET, mlp
from experiments.recipe import Recipe, Results
from experiments.tasks.lenet import PIXELS
from experiments.training import Training, cosine, cross_entropy


@dataclass(frozen=True)
class Settings:
    seeds: tuple[int, ...] = (1, 2, 3)
    steps: int = 1400
    sparsities: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    num_grads: int = 512
    test_images: int = 10_000


METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "K-FAC, without π": {"method": "kfac without π"},
    "K-FAC": {"method": "kfac"},
    "WoodFisher, blocks of 1000": {"method": "woodfisher", "block_size": 1000},
    "M-FAC, full matrix": {"method": "mfac", "block_size": None},
}


def measure(results: Results, settings: Settings) -> None:
    for seed in settings.seeds:
        keys = {label: f"{label}, seed {seed}" for label in METHODS if results.wants(label)}
        if all(key in results.cells for key in keys.values()):
            continue
        state, dense = trained(seed, settings)
        results.cell(f"dense, seed {seed}", lambda dense=dense: {"accuracy": dense})
        for label, key in keys.items():
            results.cell(key, partial(row, label, seed, state, settings))


def trained(seed: int, settings: Settings) -> tuple[dict[str, Tensor], float]:
    """The weights of a network after a few passes over MNIST, and its accuracy."""
    torch.manual_seed(seed)
    model = mlp(MLPNET)
    batches = ImageBatches(*load_mnist("train"), 128, PIXELS["mnist"], shuffle=True)
    Training(model, torch.optim.Adam(model.parameters(), 2e-3), batches, settings.steps, cosine).run()
    return model.state_dict(), accuracy(model.eval(), settings.test_images)


def row(label: str, seed: int, state: dict[str, Tensor], settings: Settings) -> dict[str, Any]:
    """One method at every sparsity, each from the dense network."""
    found = {}
    for sparsity in settings.sparsities:
        torch.manual_seed(seed)
        model = mlp(MLPNET).eval()
        model.load_state_dict(state)
        batches = ImageBatches(*load_mnist("train"), 16, PIXELS["mnist"], shuffle=True)
        prune(model, cross_entropy, batches, sparsity, num_grads=settings.num_grads,
              recomputations=1, update="obs", loss_batches=1, progress=False, seed=1, **METHODS[label])  # fmt: skip
        found[f"{sparsity:g}"] = accuracy(model, settings.test_images)
    print(f"  {label}: {found}", flush=True)
    return {"accuracy": found}


def accuracy(model: nn.Module, count: int) -> float:
    return round(make_test(PIXELS["mnist"], count, load_mnist)(model)["accuracy"], 3)


def draw(results: Results, settings: Settings) -> Path:
    curves = {}
    for label in METHODS:
        rows = [cell["accuracy"] for name, cell in results.cells.items() if name.startswith(f"{label}, seed")]
        if rows:
            means = [sum(r[f"{s:g}"] for r in rows) / len(rows) for s in settings.sparsities]
            curves[label] = ([100 * s for s in settings.sparsities], means)
            print(f"{label}:", *(f"{100 * s:g} % {v:.2f}," for s, v in zip(settings.sparsities, means, strict=True)))
    title = "784-40-20-10 on MNIST, pruned in one step, no fine-tuning"
    return drawing.lines(results.picture, curves, x="sparsity, %", y="test accuracy, %", title=title)


RECIPE = Recipe(
    "mnist_pruning", "K-FAC, WoodFisher and M-FAC on an MNIST network (figure)", measure, draw, Settings(),
    Settings((1,), 10, (0.5,), 8, 200), minutes=8,
)  # fmt: skip

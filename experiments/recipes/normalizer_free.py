"""Figure of the appendix: a ResNet with and without batch norm, pruned in one step by magnitude and by M-FAC.

M-FAC has a row for each update of the remaining weights: joint (the default, also with a hundred times the damping),
obs (the paper's), and none, which shows the effect of the selection alone. `moved` is how far the remaining weights
moved, relative to their norm.

ResNet20 and a normalizer-free ResNet20 (272,474 weights each) are trained for 600 steps on CIFAR-10 with the same
settings, and pruned: 13 minutes on one core. Gradients are clipped; the second diverges otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfac
from experiments import data, drawing
from experiments.baselines.pruning import PAPER
from experiments.models.normalizer_free import NormalizerFreeResNet
from experiments.models.resnet import ResNet
from experiments.recipe import Recipe, Results
from experiments.training import RUNS, Training, cosine, cross_entropy, last_loss

DIVERGED = 10.0  # a loss far above that of guessing
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "mfac": {"update": "joint"},
    "mfac, damping 1e-3": {"update": "joint", "damping": 1e-3},
    "mfac, obs": {"update": "obs"},
    "mfac, no update": {"update": "none"},
}
NETWORKS: dict[str, Callable[[int], nn.Module]] = {"ResNet20": ResNet, "NF-ResNet20": NormalizerFreeResNet}


@dataclass(frozen=True)
class Settings:
    sparsities: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7, 0.8)
    num_grads: int = 64
    block_size: int = 128
    steps: int = 600
    batch_size: int = 128
    test_images: int = 5000
    depth: int = 20


def measure(results: Results, settings: Settings) -> None:
    test = data.make_test(data.CIFAR10, settings.test_images)
    for network in NETWORKS:
        wanted = [m for m in METHODS if results.wants(f"{network}, {m}")]
        if all(f"{network}, {method}" in results.cells for method in wanted):
            continue
        model = trained(network, settings, RUNS if settings.depth == 20 else results.path.parent)
        results.cell(f"{network}, dense", partial(test, model))
        for method in wanted:
            results.cell(f"{network}, {method}", partial(row, model, test, method, settings))


def row(model: nn.Module, test: Any, method: str, settings: Settings) -> dict[str, Any]:
    """One method at every sparsity, each from the dense network."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = {}
    options = {"num_grads": settings.num_grads, "block_size": settings.block_size, "recomputations": 1, "seed": 1,
               "loss_batches": 1, "progress": False}  # fmt: skip
    for sparsity in settings.sparsities:
        model.load_state_dict(state)
        batches = data.cifar_batches(16, data.CIFAR10, seed=0, augment=False)
        pruned = mfac.prune(model, cross_entropy, batches, sparsity, **PAPER | METHODS[method] | options)
        found[f"{sparsity:g}"] = test(model) | {"moved": moved(model, state, pruned.masks)}
    model.load_state_dict(state)
    print(f"  {method}: {found}", flush=True)
    return {"points": found}


def moved(model: nn.Module, before: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]) -> float:
    """How far the remaining weights moved, relative to their norm."""
    weights = dict(model.named_parameters())
    way = sum(float((weights[name].detach() - before[name])[kept].square().sum()) for name, kept in masks.items())
    length = sum(float(before[name][kept].square().sum()) for name, kept in masks.items())
    return round(math.sqrt(way / length), 4)


def trained(name: str, settings: Settings, folder: Path) -> nn.Module:
    """A network after a short training; its file is kept."""
    torch.manual_seed(1)
    model = NETWORKS[name](settings.depth).to(memory_format=torch.channels_last)
    path = folder / f"normalizer_free_{name}_{settings.steps}_trained.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    batches = data.cifar_batches(settings.batch_size, data.CIFAR10, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
    record = Training(model, optimizer, batches, settings.steps, cosine).run()
    print(f"  {name} trained: loss {record['losses'][-1]}", flush=True)
    if not last_loss(record) < DIVERGED:
        raise RuntimeError(f"{name} has diverged in training: there is nothing to prune")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()


def draw(results: Results, settings: Settings) -> Path:
    dense = {key.split(", ")[0]: cell["accuracy"] for key, cell in results.cells.items() if "points" not in cell}
    figure, (panels,) = drawing.panels(1, max(1, len(dense)), (13, 4.8), sharey=True)
    for axis, (network, accuracy) in zip(panels, dense.items(), strict=False):
        for number, method in enumerate(METHODS):
            points = results.cells.get(f"{network}, {method}", {"points": {}})["points"]
            xs, ys = [100 * float(s) for s in points], [point["accuracy"] / accuracy for point in points.values()]
            axis.plot(xs, ys, label=method, **drawing.style(number))
            print(f"{network}, {method}:", *(f"{x:g} % {y:.3f}," for x, y in zip(xs, ys, strict=True)))
        axis.set(title=f"{network}, dense {accuracy:.1f} %", xlabel="sparsity, %")
    panels[0].set_ylabel("test accuracy as a share of the dense model's")
    panels[0].legend()
    figure.suptitle("With and without batch norm, pruned in one step")
    return drawing.save(figure, results.picture)


RECIPE = Recipe(
    "normalizer_free", "normalizer-free against batch norm, one-shot (figure)", measure, draw, Settings(),
    Settings((0.5,), 2, 8, 2, 8, 50, depth=8), minutes=7,
)  # fmt: skip

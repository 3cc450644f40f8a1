"""Figures: accuracy against seconds for SGD, Adam and M-FAC.

ResNet20 on CIFAR-10, one pass, with the best of four settings per optimizer: 12 minutes on one core.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import data, drawing
from experiments.contenders import PAPER_DAMPING, PAPER_WINDOW, Contender
from experiments.models.resnet import ResNet
from experiments.recipe import Recipe, Results
from experiments.training import Training


@dataclass(frozen=True)
class Settings:
    depth: int = 20
    batch_size: int = 128
    num_grads: int = PAPER_WINDOW
    tests: int = 6
    test_images: int = 2500
    steps: int | None = None  # None: one pass


def contenders(settings: Settings) -> dict[str, Contender]:
    shared: dict[str, Any] = {"schedule": "cosine", "batch_size": settings.batch_size, "num_grads": settings.num_grads}
    return {
        "SGD": Contender("SGD", 0.03, 1e-4, **shared),
        "Adam": Contender("Adam", 3e-3, **shared),
        "M-FAC": Contender("M-FAC", 1 / PAPER_WINDOW, 3e-3, damping=PAPER_DAMPING, **shared),
    }


def measure(results: Results, settings: Settings) -> None:
    for label, contender in contenders(settings).items():
        results.row(label, partial(trained, contender, settings))


def trained(contender: Contender, settings: Settings) -> dict[str, Any]:
    torch.manual_seed(1)
    model = ResNet(settings.depth, projection=False).to(memory_format=torch.channels_last)
    batches = data.cifar_batches(contender.batch_size, data.CIFAR10, seed=1)
    steps = settings.steps or len(batches)
    return Training(
        model, contender.make(model), batches, steps, contender.factor(),
        test=data.make_test(data.CIFAR10, settings.test_images), test_every=max(1, steps // settings.tests),
    ).run()  # fmt: skip


def draw(results: Results, settings: Settings) -> Path:
    curves = {}
    for label, cell in results.cells.items():
        points = [(cell["seconds"][test["step"] - 1], test["accuracy"]) for test in cell["tests"]]
        curves[label] = drawing.curve(points)
        print(f"{label}: {points[-1][1]:.2f} % after {points[-1][0]:.0f} s" if points else f"{label}: stopped")
    x, y = "seconds of one core, without tests", "test accuracy, %"
    return drawing.lines(results.picture, curves, x=x, y=y, title="Accuracy by time")


RECIPE = Recipe(
    "wall_clock", "accuracy by seconds for SGD, Adam and M-FAC (figures)", measure, draw, Settings(),
    Settings(8, 8, 4, test_images=100, steps=2), minutes=12,
)  # fmt: skip

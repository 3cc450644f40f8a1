"""Figures: accuracy against seconds for SGD, Adam and M-FAC.

Small: ResNet20 on CIFAR-10, one pass, with the best of four settings per optimizer from the search of `python -m
experiments.optimizers cifar10` (its own runs, of three passes, are in docs/optimizer.md): 12 minutes on one core. Full:
WRN 40-2 on CIFAR-100, 50 passes, SGD with and without momentum, Adam and M-FAC with the settings of table 4, right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import data, drawing
from experiments.contenders import PAPER_DAMPING, PAPER_WINDOW, Contender, plain_contenders
from experiments.data import cifar10
from experiments.datasets.images import load_cifar100
from experiments.image_task import untrained_resnet8
from experiments.models.resnet import ResNet
from experiments.models.wide_resnet import WideResNet
from experiments.recipe import Recipe, Request, Results
from experiments.training import Training, file_of

WITHOUT_MOMENTUM = "SGD without momentum"
SEARCHED = {
    "SGD": Contender("SGD", 0.03, 1e-4, schedule="cosine"),
    "Adam": Contender("Adam", 3e-3, schedule="cosine"),
    "M-FAC": Contender("M-FAC", 1 / PAPER_WINDOW, 3e-3, damping=PAPER_DAMPING, schedule="cosine"),
}


@dataclass(frozen=True)
class Settings:
    entrants: dict[str, Contender]
    make_model: Callable[[], nn.Module]
    load: Callable[[str], Any]
    passes: int = 1
    tests_a_pass: int = 1
    test_images: int = 10_000
    steps: int | None = None  # fewer than the passes have


SIZES = {
    "full": Settings(
        plain_contenders() | {WITHOUT_MOMENTUM: Contender("SGD", 0.1, batch_size=256)},
        lambda: WideResNet(40, 2, 100), load_cifar100, passes=50,
    ),
    "small": Settings(
        SEARCHED, lambda: ResNet(20, projection=False).to(memory_format=torch.channels_last), cifar10,
        tests_a_pass=6, test_images=2500,
    ),
    "smoke": Settings(
        plain_contenders(4, 8),
        untrained_resnet8, cifar10, test_images=100, steps=2,
    ),
}  # fmt: skip


def run(request: Request) -> None:
    results, settings = Results("wall_clock", request), SIZES[request.size]
    results.settings(
        passes=settings.passes, test_images=settings.test_images,
        contenders={label: contender.settings() for label, contender in settings.entrants.items()},
    )  # fmt: skip
    for label, contender in settings.entrants.items():
        if request.wants(label):
            results.cell(label, lambda a=(label, contender): trained(*a, request.size, settings))


def trained(label: str, contender: Contender, size: str, settings: Settings) -> dict[str, Any]:
    torch.manual_seed(1)
    model = settings.make_model()
    optimizer = contender.make(model)
    if label == WITHOUT_MOMENTUM:
        optimizer.param_groups[0]["momentum"] = 0.0
    batches = data.ImageBatches(*settings.load("train"), contender.batch_size, data.CIFAR10, seed=1, augment=True)
    steps = settings.steps or settings.passes * len(batches)
    return Training(
        model, optimizer, batches, steps, contender.factor(),
        test=data.make_test(data.CIFAR10, settings.test_images, settings.load),
        test_every=max(1, min(steps, len(batches)) // settings.tests_a_pass),
        keep=file_of(f"wall_clock_{label}") if size == "full" else None, keep_every=5,
    ).run()  # fmt: skip


def plot(request: Request) -> Path:
    results = Results("wall_clock", request)
    curves = {}
    for label, cell in results.cells.items():
        points = [(cell["seconds"][test["step"] - 1], test["accuracy"]) for test in cell["tests"]]
        curves[label] = drawing.curve(points)
        print(f"{label}: {points[-1][1]:.2f} % after {points[-1][0]:.0f} s" if points else f"{label}: stopped")
    x, y = "seconds of one core, without tests", "test accuracy, %"
    return drawing.lines(results.picture, curves, x=x, y=y, title="Accuracy by time")


RECIPE = Recipe("wall_clock", "accuracy by seconds for SGD, Adam and M-FAC (figures)", run, plot, minutes=12)

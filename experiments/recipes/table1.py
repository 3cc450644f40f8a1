"""Table 1: gradual pruning with WoodFisher's schedule, for magnitude, WoodFisher and M-FAC.

All have the same polynomial schedule, learning rates, weight decay and epochs; only the pruning differs. ResNet20 on
CIFAR-10 to 95 %, 60 "epochs" of 8 batches of 128, in all 1.25 passes over the images: 22 minutes of one core.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.gradual_pruning import train
from experiments.image_task import ImageTask, resnet20_task
from experiments.recipe import Recipe, Results
from experiments.training import cross_entropy
from mfac.pruning import attach_masks, polynomial_schedule

METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "WoodFisher": {"method": "woodfisher", "update": "obs"},
    "M-FAC": {"method": "mfac", "update": "obs"},
}


@dataclass(frozen=True)
class Settings:
    prune_at: dict[int, float] = field(  # {epoch: the sparsity that is reached before it}
        default_factory=lambda: {4 * i: sparsity for i, sparsity in enumerate(polynomial_schedule(0.0, 0.95, 6))}
    )
    epochs: int = 60
    epoch_batches: int = 8
    batch_size: int = 128
    num_grads: int = 64
    mfac_grads: int = 256
    block_size: int = 128
    test_images: int = 2500
    tiny: bool = False


def learning_rate(epoch: int) -> float:
    """0.005, times 0.92 every epoch from the 30th on: that of MobileNetV1."""
    return 0.005 * 0.92 ** max(0, epoch - 29)


def measure(results: Results, settings: Settings) -> None:
    task = resnet20_task(settings.test_images, tiny=settings.tiny)
    results.cell("dense", lambda: task.test(task.model()))
    for label in METHODS:
        results.row(label, partial(gradual, label, task, settings))


def gradual(label: str, task: ImageTask, settings: Settings) -> dict[str, Any]:
    """A row for every epoch: sparsity, seconds, accuracy after pruning and after training."""
    model, rows, masks = task.model(), [], {}
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9, weight_decay=1e-4)
    scheduler = LambdaLR(optimizer, lambda done: learning_rate(done // settings.epoch_batches))
    keeper = attach_masks(optimizer, masks, model)
    num_grads = settings.mfac_grads if label == "M-FAC" else settings.num_grads
    for epoch in range(settings.epochs):
        row: dict[str, Any] = {"epoch": epoch}
        if epoch in settings.prune_at:
            began, number = time.process_time(), list(settings.prune_at).index(epoch)
            result = prune(
                model, cross_entropy, task.batches(16, 1000 + number), settings.prune_at[epoch], masks=masks,
                seed=number, recomputations=1, loss_batches=1, progress=False, num_grads=num_grads,
                block_size=settings.block_size, **METHODS[label],
            )  # fmt: skip
            masks = result.masks
            keeper.update(masks)
            row |= {"sparsity": result.sparsity, "pruning_seconds": round(time.process_time() - began, 2)}
            row["pruned"] = task.test(model)
        source = task.batches(settings.batch_size, epoch)
        row["training_seconds"] = round(train(model, optimizer, scheduler, source, settings.epoch_batches), 2)
        if epoch == settings.epochs - 1 or epoch % 20 == 0 or epoch + 1 in settings.prune_at:
            row["trained"] = task.test(model)
        rows.append(row)
        print(f"  epoch {epoch + 1} of {settings.epochs}: {row}", flush=True)
    return {"rows": rows}


def draw(results: Results, settings: Settings) -> Path:
    """Accuracy during pruning; the drops are the pruning steps."""
    curves = {}
    for label in filter(results.cells.__contains__, METHODS):
        rows = results.cells[label]["rows"]
        tests = [(row["epoch"] + later, row[when]["accuracy"]) for row in rows
                 for later, when in enumerate(("pruned", "trained")) if when in row]  # fmt: skip
        curves[label] = drawing.curve(tests)
        sparsity = [row["sparsity"] for row in rows if "sparsity" in row][-1]
        spent = sum(row.get("pruning_seconds", 0) for row in rows)
        print(f"{label}: {tests[-1][1]:.2f} % at a sparsity of {sparsity:.4f}, {spent:.0f} s of pruning")
    print(f"dense: {results.cells['dense']['accuracy']:.2f} %")
    title = "Gradual pruning with WoodFisher's schedule"
    return drawing.lines(results.picture, curves, x="epoch", y="test accuracy, %", title=title)


RECIPE = Recipe(
    "table1", "gradual pruning, WoodFisher's schedule (table 1)", measure, draw, Settings(),
    Settings({0: 0.5, 1: 0.6}, 2, 1, 8, 2, 2, 16, test_images=100, tiny=True), minutes=15,
)  # fmt: skip

"""What tables 1 and 3 prune gradually: ResNet20 on CIFAR-10, or a model on ImageNet where a folder of it is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from experiments import data, drawing
from experiments.cifar_images import cifar10, untrained_resnet8
from experiments.gradual import GradualRun, Plan
from experiments.imagenet import folder_batches, load_weights, tester
from experiments.models.resnet import mfac_resnet20
from experiments.recipe import Request, Results

RUNS = data.data_folder().parent / "runs"


def make_task(request: Request, test_images: int) -> tuple[Callable[[], nn.Module], Callable[[int, int], Any], Any]:
    """(make a trained model, (batch size, seed) -> batches, test)."""
    if request.size == "full" or request.images is not None:
        return (
            lambda: load_weights(request.weights()),
            lambda size, seed: folder_batches(request, "train", size, seed),
            tester(request),
        )
    train = cifar10("train")
    images, labels = (part[:test_images] for part in cifar10("test"))
    held_out = data.ImageBatches(images, labels, 100, data.HALVES)
    return (
        untrained_resnet8 if request.size == "smoke" else mfac_resnet20,
        lambda size, seed: data.ImageBatches(*train, size, data.HALVES, seed=seed, augment=True),
        lambda model: {"accuracy": data.accuracy(model, held_out)},
    )


def run_plans(name: str, request: Request, plans: dict[str, Plan], test_images: int, test_every: int) -> None:
    """A cell for every plan."""
    results = Results(name, request)
    make_model, batches, test = make_task(request, test_images)
    results.settings(plans={label: _described(plan) for label, plan in plans.items()}, test_images=test_images)
    results.cell("dense", lambda: test(make_model()))
    for label, plan in plans.items():
        if request.wants(label):
            keep = None if request.size == "smoke" else RUNS / f"{name}_{request.size}_{label}.pt".replace(" ", "_")
            results.cell(label, lambda a=(plan, keep): GradualRun(
                make_model(), a[0], batches, test, a[1], test_every).run())  # fmt: skip


def plot_plans(name: str, request: Request, title: str) -> Path:
    """Accuracy in the course of pruning; the drops are the pruning steps."""
    results = Results(name, request)
    curves = {}
    for label, cell in results.cells.items():
        if label == "dense":
            continue
        points = []
        for row in cell["rows"]:
            if "pruned" in row:
                points.append((row["epoch"], row["pruned"]["accuracy"]))
            if "trained" in row:
                points.append((row["epoch"] + 1, row["trained"]["accuracy"]))
        curves[label] = ([x for x, _ in points], [y for _, y in points])
        sparsity = [row["sparsity"] for row in cell["rows"] if "sparsity" in row][-1]
        spent = sum(row.get("pruning_seconds", 0) for row in cell["rows"])
        print(f"{label}: {points[-1][1]:.2f} % at a sparsity of {sparsity:.4f}, {spent:.0f} s of pruning")
    print(f"dense: {results.cells['dense']['accuracy']:.2f} %")
    return drawing.lines(results.picture(), curves, x="epoch", y="test accuracy, %", title=title)


def _described(plan: Plan) -> dict[str, Any]:
    described = dict(vars(plan))
    described["lr"] = [round(plan.lr(epoch), 8) for epoch in range(plan.epochs)]
    return described

"""Table 1: gradual pruning with WoodFisher's schedule, for magnitude, WoodFisher and M-FAC.

All have the same polynomial schedule, learning rates, weight decay and epochs; only the pruning differs.

Small: ResNet20 on CIFAR-10 to 95 %, 60 "epochs" of 8 batches of 128, in all 1.25 passes over the images: 22 minutes of
one core. Full: MobileNetV1 to 89 % or ResNet50 to 95 % on ImageNet, depending on the checkpoint: --images FOLDER
--checkpoint FILE with {"model": ..., "state_dict": ...}.
"""

from pathlib import Path

import torch

from experiments.gradual import Plan, plot_plans, run_plans
from experiments.recipe import Recipe, Request
from mfac.pruning import polynomial_schedule

RATE = 0.005


def mobilenet_rate(epoch: int) -> float:
    """0.005, times 0.92 every epoch from the 30th on."""
    return RATE * 0.92 ** max(0, epoch - 29)


def resnet50_rate(epoch: int) -> float:
    """0.005, times 0.6 every 6 epochs from the 40th to the 90th."""
    return RATE * 0.6 ** (0 if epoch < 40 else (min(epoch, 90) - 40) // 6 + 1)


def plans(request: Request) -> dict[str, Plan]:
    if request.size == "smoke":
        return _plans({0: 0.5, 1: 0.6}, 2, lambda epoch: RATE, {"num_grads": 2, "block_size": 16}, {}, 8, 1)
    if request.size == "small":
        woodfisher = {"num_grads": 64, "block_size": 128}
        return _plans(_every(4, 0.95, 6), 60, mobilenet_rate, woodfisher, {"num_grads": 256}, 128, 8)
    if torch.load(request.weights(), map_location="cpu", weights_only=True)["model"] == "mobilenet":
        woodfisher = {"num_grads": 400, "block_size": 10_000}
        return _plans(_every(4, 0.89, 6), 100, mobilenet_rate, woodfisher, {"num_grads": 4000}, 256, None)
    woodfisher = {"num_grads": 400, "block_size": 2000}
    return _plans(_every(5, 0.95, 8), 100, resnet50_rate, woodfisher, {"num_grads": 1000}, 256, None)


def _every(epochs: int, final: float, steps: int) -> dict[int, float]:
    return {epochs * i: sparsity for i, sparsity in enumerate(polynomial_schedule(0.0, final, steps))}


def _plans(steps, epochs, rate, woodfisher, ours, batch_size, epoch_batches) -> dict[str, Plan]:  # type: ignore[no-untyped-def]
    """Magnitude, WoodFisher with its authors' settings, M-FAC with more gradients; one estimate per step."""
    shared = {"damping": 1e-5, "recomputations": 1, "loss_batches": 1, **woodfisher}
    arguments = {
        "magnitude": shared | {"method": "magnitude"},
        "WoodFisher": shared | {"method": "woodfisher", "update": "obs"},
        "M-FAC": shared | {"method": "mfac", "update": "obs"} | ours,
    }
    return {
        label: Plan(steps, epochs, rate, pruning, weight_decay=1e-4, batch_size=batch_size, epoch_batches=epoch_batches)
        for label, pruning in arguments.items()
    }


def run(request: Request) -> None:
    images = {"small": 2500, "smoke": 100, "full": 50_000}[request.size]
    run_plans("table1", request, plans(request), images, test_every=1 if request.size == "full" else 20)


def plot(request: Request) -> Path:
    return plot_plans("table1", request, "Gradual pruning with WoodFisher's schedule")


RECIPE = Recipe("table1", "gradual pruning, WoodFisher's schedule (table 1)", run, plot, minutes=15)

"""Table 3: gradual pruning with practical schedules: blocks of 128, 64 gradients, 16 recomputations per step.

Small: `python -m experiments.gradual_pruning run`, ResNet20 to 95 and 98 %: M-FAC against magnitude with the same cost
in images; a search, then two runs of about 20 minutes each on one core, in parallel with --jobs 2. Full: MobileNetV1 to
75 and 89 % or ResNet50 to 95 and 98 % on ImageNet, depending on the checkpoint, 100 epochs each: --images FOLDER
--checkpoint FILE with {"model": ..., "state_dict": ...}.
"""

from pathlib import Path

import torch

from experiments import gradual_pruning
from experiments.gradual import Plan, plot_plans, run_plans
from experiments.recipe import Recipe, Request
from mfac.pruning import mobilenet_schedule, resnet50_schedule

RATE = 0.005
PRUNING = {"num_grads": 64, "block_size": 128, "recomputations": 16, "damping": 1e-5, "loss_batches": 1}


def mobilenet_plan(final: float) -> Plan:
    """Half at once, then 15 steps every 3 epochs; drops at epochs 75 and 90."""
    return _plan(mobilenet_schedule(final), 3, (75, 90))


def resnet50_plan(final: float) -> Plan:
    """Half at once, then 20 steps every 4 epochs; drops at epochs 90 and 95."""
    return _plan(resnet50_schedule(final), 4, (90, 95))


def _plan(schedule: list[float], period: int, drops: tuple[int, int]) -> Plan:
    """The first sparsity is reached before epoch 0, the others before epochs `period`, 2 `period`, ...

    The last epoch before each pruning step has a tenth of the learning rate.
    """
    prune_at = {period * i: sparsity for i, sparsity in enumerate(schedule)}
    cycles = period * (len(schedule) - 1)

    def rate(epoch: int) -> float:
        if epoch < cycles:
            return RATE * (0.1 if epoch % period == period - 1 else 1.0)
        return RATE * 0.1 ** sum(epoch >= drop for drop in drops)

    return Plan(prune_at, 100, rate, PRUNING, reset_momentum=True, gradient_batch=32)


def plans(request: Request) -> dict[str, Plan]:
    if request.size == "smoke":
        pruning = PRUNING | {"num_grads": 2, "recomputations": 2}
        return {"60 %": Plan({0: 0.5, 1: 0.6}, 2, lambda epoch: RATE, pruning, reset_momentum=True, batch_size=8,
                             gradient_batch=2, epoch_batches=1)}  # fmt: skip
    model = torch.load(request.weights(), map_location="cpu", weights_only=True)["model"]
    make, finals = (mobilenet_plan, (0.75, 0.89)) if model == "mobilenet" else (resnet50_plan, (0.95, 0.98))
    return {f"{final:.0%}": make(final) for final in finals}


def run(request: Request) -> None:
    if request.size == "small":
        for row in filter(request.wants, gradual_pruning.METHODS):
            gradual_pruning.run(row, request.folder)
    else:
        run_plans("table3", request, plans(request), 100 if request.size == "smoke" else 50_000, test_every=1)


def plot(request: Request) -> Path:
    if request.size == "small":
        return gradual_pruning.plot(request.folder, request.folder)
    return plot_plans("table3", request, "Gradual pruning with practical schedules")


RECIPE = Recipe("table3", "gradual pruning, practical schedules (table 3)", run, plot, minutes=20)

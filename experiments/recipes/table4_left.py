"""Table 4, left: ResNet20 and ResNet32 on CIFAR-10 by seven optimizers: accuracy, and overhead of a step over SGD's.

A search of three learning rates for every optimizer (the paper's, a third and three times it; 32 steps each), then 96
steps with the best, one seed, ResNet20 only, batches of 128 for K-FAC too; overheads for both networks, the optimizers
taking turns. 19 minutes on two cores with --jobs 2. So few steps show the start of training, not its end.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import data, drawing
from experiments.contenders import Contender, resnet_contenders
from experiments.models.resnet import plain_resnet
from experiments.recipe import Recipe, Results
from experiments.step_times import overheads, processor_seconds, step_of, take_turns
from experiments.training import last_loss

PAPER = {  # overheads
    20: {"SGD": 1.0, "Adam": 1.05, "AdamW": 1.05, "K-FAC": 1.21, "K-FAC, batches of 128": 2.35, "GGT": 1.05,
         "GGT, 512 gradients": 8.35, "AdaHessian": 3.50, "M-FAC": 1.55},
    32: {"SGD": 1.0, "Adam": 1.10, "AdamW": 1.10, "K-FAC": 1.50, "K-FAC, batches of 128": 3.05, "GGT": 1.05,
         "GGT, 512 gradients": 8.88, "AdaHessian": 3.30, "M-FAC": 1.50},
}  # fmt: skip
LOOKING = "K-FAC, factors at every step"


@dataclass(frozen=True)
class Settings:
    depth: int = 20
    timed_depths: tuple[int, ...] = (20, 32)
    steps: int = 96
    search_steps: int = 32
    factors: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    rounds: int = 6
    window: int | None = None  # None: the paper's
    batch_size: int = 128
    test_images: int = 5000


def measure(results: Results, settings: Settings) -> None:
    entrants = sorted(resnet_contenders(settings.depth).items(), key=lambda item: item[0] != "AdaHessian")
    for label, contender in entrants:  # the slowest first, for --jobs
        if results.wants(label):
            compete(results, f"ResNet{settings.depth}, {label}", sized(contender, settings), settings)
    for depth in sorted(settings.timed_depths, reverse=True):  # the longest first
        results.row(f"overheads, ResNet{depth}", partial(timed, depth, settings))


def sized(contender: Contender, settings: Settings) -> Contender:
    num_grads = settings.window or contender.num_grads
    return replace(contender, batch_size=settings.batch_size, num_grads=num_grads)


def compete(results: Results, row: str, contender: Contender, settings: Settings) -> None:
    """The search, then the run with the learning rate of the lowest loss."""
    tried = {f"lr {contender.lr * f:.3g}": replace(contender, lr=contender.lr * f) for f in settings.factors}
    # The search needs only the loss, and testing would take as long as training.
    search = {label: partial(trained, c, settings.depth, 0, settings.search_steps, 0) for label, c in tried.items()}
    found = {label: results.cell(f"search, {row}, {label}", search[label]) for label in tried}
    best = min(found, key=lambda label: last_loss(found[label]))
    run = partial(trained, tried[best], settings.depth, 1, settings.steps, settings.test_images)
    results.cell(f"run, {row}, {best}, seed 1", run)


def trained(contender: Contender, depth: int, seed: int, steps: int, test_images: int) -> dict[str, Any]:
    record = contender.train(partial(plain_resnet, depth), seed, steps, test_images)
    return record | {"best": max((t["accuracy"] for t in record["tests"]), default=0.0), "schedule": contender.schedule}


def timed(depth: int, settings: Settings) -> dict[str, Any]:
    """Steps on batches of 128, and of 1,000 for K-FAC as the paper ran it, against SGD's on the same batches."""
    usual = settings.batch_size
    found = resnet_contenders(depth)
    looking = replace(found["K-FAC"], every=1)
    small = {"SGD": found["SGD"], "Adam": found["Adam"], "AdamW": found["AdamW"], "GGT": found["GGT"],
             "GGT, 512 gradients": replace(found["GGT"], num_grads=512), "AdaHessian": found["AdaHessian"],
             "M-FAC": found["M-FAC"], "K-FAC, batches of 128": found["K-FAC"], LOOKING: looking}  # fmt: skip
    times = take_turns(_steps(depth, small, usual, settings), settings.rounds)
    # Large batches vary less. In a smoke test one more image, so that both are different.
    large = {label: found[label] for label in ("SGD", "K-FAC")}
    steps = _steps(depth, large, 1000 if usual == 128 else usual + 1, settings)
    first = processor_seconds(steps["K-FAC"])  # updates the factors, as every tenth step does
    wide = take_turns(steps, max(1, settings.rounds // 3)) | {LOOKING: [first]}
    return {
        "batches of 128": spread(overheads(times, "SGD"), "K-FAC, batches of 128", found["K-FAC"].every),
        "batches of 1000": spread(overheads(wide, "SGD"), "K-FAC", found["K-FAC"].every),
        "seconds": {"batches of 128": times, "batches of 1000": wide},
        "paper": PAPER.get(depth, PAPER[20]),
    }


def spread(found: dict[str, Any], name: str, every: int) -> dict[str, Any]:
    """K-FAC's figures as means over the steps between two updates of the factors."""
    rare, usual = found[LOOKING], found[name]
    return found | {name: {key: round((rare[key] + (every - 1) * usual[key]) / every, 4) for key in usual}}


def _steps(depth: int, entered: dict[str, Contender], batch: int, settings: Settings) -> dict[str, Callable[[], None]]:
    few = list(itertools.islice(data.cifar_batches(batch, data.CIFAR10, seed=3), settings.rounds + 1))
    steps = {}
    for label, contender in entered.items():
        torch.manual_seed(0)
        model = plain_resnet(depth)
        steps[label] = step_of(model, sized(contender, settings).make(model), few)
    return steps


def draw(results: Results, settings: Settings) -> Path:
    figure, ((left, right),) = drawing.panels(1, 2, (13, 4.8))
    for number, (key, run) in enumerate((k, r) for k, r in results.cells.items() if k.startswith("run, ")):
        losses = [sum(run["losses"][max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(run["losses"]))]
        label = key.removeprefix("run, ")
        left.plot(losses, label=f"{label}: {run['best']:.1f} %", markevery=max(1, len(losses) // 8),
                  **drawing.style(number))  # fmt: skip
        told = f"best {run['best']:.2f} %, {run['seconds'][-1]:.0f} s" if run["seconds"] else "stopped"
        print(f"{label}: {told}")
    left.set(xlabel="step", ylabel="training loss, mean of 10 steps", title="Loss, and the best test accuracy")
    left.legend(fontsize=7)
    _draw_overheads(right, results, settings)
    return drawing.save(figure, results.picture)


def _draw_overheads(axis: Any, results: Results, settings: Settings) -> None:
    names = [label for label in PAPER[20] if label != "SGD"]
    for number, depth in enumerate(settings.timed_depths):
        cell = results.cells.get(f"overheads, ResNet{depth}")
        if cell is None:
            continue
        found = cell["batches of 128"] | {"K-FAC": cell["batches of 1000"]["K-FAC"]}
        values = [found[name]["over_sgd"] for name in names]
        axis.plot(values, range(len(names)), label=f"ResNet{depth}, measured", linestyle="", marker="os"[number])
        axis.plot([cell["paper"][name] for name in names], range(len(names)), label=f"ResNet{depth}, the paper's",
                  linestyle="", marker="+x"[number], color="black")  # fmt: skip
        print(f"ResNet{depth}:", *(f"{n} {v:.2f}," for n, v in zip(names, values, strict=True)))
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set(xlabel="seconds of a step over SGD's", xscale="log", title="Overhead of a step")
    axis.legend(fontsize=8)


RECIPE = Recipe(
    "table4_left", "optimizers on ResNet20 and 32, accuracy and overhead (table 4, left)", measure, draw, Settings(),
    Settings(8, (8,), 2, 1, (1.0,), 1, 3, 4, 100), minutes=19,
)  # fmt: skip

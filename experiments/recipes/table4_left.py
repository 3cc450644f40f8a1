"""Table 4, left: ResNet20 and ResNet32 on CIFAR-10 by seven optimizers: accuracy, and overhead of a step over SGD's.

Small: a search of three learning rates for every optimizer (the paper's, a third and three times it; 32 steps each),
then 96 steps with the best, one seed, ResNet20 only, batches of 128 for K-FAC too; overheads for both networks, the
optimizers taking turns. 19 minutes on two cores with --jobs 2. So few steps show the start of training, not its end.
Full: 164 epochs, the paper's hyperparameters, a search over its seven weight decays for every optimizer that has one
(the others get seven learning rates around the paper's), then five seeds; resumable after each epoch.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments import data, drawing
from experiments.contenders import WEIGHT_DECAYS, Contender, resnet_contenders
from experiments.models.resnet import ResNet
from experiments.recipe import Recipe, Request, Results
from experiments.step_times import overheads, processor_seconds, step_of, take_turns
from experiments.training import Training, file_of, last_loss

PAPER = {
    20: {"SGD": (91.78, 1.0), "Adam": (89.67, 1.05), "AdamW": (91.78, 1.05), "K-FAC": (91.65, 1.21),
         "K-FAC, batches of 128": (None, 2.35), "GGT": (88.38, 1.05), "GGT, 512 gradients": (None, 8.35),
         "AdaHessian": (92.17, 3.50), "M-FAC": (92.34, 1.55)},
    32: {"SGD": (92.80, 1.0), "Adam": (90.56, 1.10), "AdamW": (92.58, 1.10), "K-FAC": (90.09, 1.50),
         "K-FAC, batches of 128": (None, 3.05), "GGT": (89.14, 1.05), "GGT, 512 gradients": (None, 8.88),
         "AdaHessian": (92.81, 3.30), "M-FAC": (92.65, 1.50)},
}  # fmt: skip
LOOKING = "K-FAC, factors at every step"


@dataclass(frozen=True)
class Settings:
    depths: tuple[int, ...]
    timed_depths: tuple[int, ...]
    steps: int
    search_steps: int
    seeds: int
    factors: tuple[float, ...]
    decays: bool
    rounds: int
    window: int | None = None
    batch_size: int | None = None
    test_images: int = 10_000


SIZES = {
    "full": Settings((20, 32), (20, 32), 164 * 390, 164 * 390, 5, (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), True, 20),
    "small": Settings((20,), (20, 32), 96, 32, 1, (1 / 3, 1.0, 3.0), False, 6, batch_size=128, test_images=5000),
    "smoke": Settings((8,), (8,), 2, 1, 1, (1.0,), False, 1, window=3, batch_size=4, test_images=100),
}


def run(request: Request) -> None:
    results, settings = Results("table4_left", request), SIZES[request.size]
    entered = {d: {label: c.settings() for label, c in entrants(d, settings).items()} for d in settings.timed_depths}
    results.settings(**vars(settings), contenders=entered)
    for depth in settings.depths:
        for label, contender in entrants(depth, settings).items():
            if request.wants(label):
                compete(results, f"ResNet{depth}, {label}", depth, contender, settings)
    for depth in sorted(settings.timed_depths, reverse=True):  # the longest first
        if request.wants(f"overheads, ResNet{depth}"):
            results.cell(f"overheads, ResNet{depth}", lambda depth=depth: timed(depth, settings))


def entrants(depth: int, settings: Settings) -> dict[str, Contender]:
    """The paper's, with smaller batches and windows where the size says so; the slowest first, for --jobs."""
    found = sorted(resnet_contenders(depth).items(), key=lambda item: item[0] != "AdaHessian")
    return {
        label: replace(c, batch_size=settings.batch_size or c.batch_size, num_grads=settings.window or c.num_grads)
        for label, c in found
    }


def candidates(contender: Contender, settings: Settings) -> dict[str, Contender]:
    """What the search tries: the same number for every optimizer."""
    if settings.decays and contender.decay:
        return {f"weight decay {decay:g}": replace(contender, decay=decay) for decay in WEIGHT_DECAYS}
    return {f"lr {contender.lr * f:.3g}": replace(contender, lr=contender.lr * f) for f in settings.factors}


def compete(results: Results, row: str, depth: int, contender: Contender, settings: Settings) -> None:
    """The search, then the runs with its best setting: by accuracy, or in short searches by loss."""
    tried = candidates(contender, settings)
    for label, candidate in tried.items():
        key = f"search, {row}, {label}"
        results.cell(key, lambda a=(candidate, key): trained(*a, depth, 0, settings.search_steps, settings))
    found = {label: results.cells[f"search, {row}, {label}"] for label in tried}
    best = max(found, key=lambda label: found[label]["best"]) if settings.decays else (
        min(found, key=lambda label: last_loss(found[label])))  # fmt: skip
    for seed in range(1, settings.seeds + 1):
        key = f"run, {row}, {best}, seed {seed}"
        results.cell(key, lambda a=(tried[best], key, depth, seed): trained(*a, settings.steps, settings))


def trained(contender: Contender, key: str, depth: int, seed: int, steps: int, settings: Settings) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ResNet(depth, projection=False).to(memory_format=torch.channels_last)
    batches = data.cifar_batches(contender.batch_size, data.CIFAR10, seed)
    # Steps are counted in batches of 128; larger batches make fewer of them.
    steps = max(1, steps * 128 // contender.batch_size) if settings.decays else steps
    # A short search needs only the loss, and testing would take as long as training.
    tested = settings.decays or key.startswith("run")
    training = Training(
        model, contender.make(model), batches, steps, contender.factor(),
        test=data.make_test(data.CIFAR10, settings.test_images) if tested else None,
        test_every=len(batches) if settings.decays else max(1, steps // 3),
        keep=file_of(f"table4_left_{key}") if settings.decays else None,
    )  # fmt: skip
    record = training.run()
    return record | {"best": max((t["accuracy"] for t in record["tests"]), default=0.0), "schedule": contender.schedule}


def timed(depth: int, settings: Settings) -> dict[str, Any]:
    """Steps on batches of 128, and of 1,000 for K-FAC as the paper ran it, against SGD's on the same batches."""
    usual = settings.batch_size or 128
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
        "paper": {label: overhead for label, (_, overhead) in PAPER.get(depth, PAPER[20]).items()},
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
        model = ResNet(depth, projection=False).to(memory_format=torch.channels_last)
        contender = contender if settings.window is None else replace(contender, num_grads=settings.window)
        steps[label] = step_of(model, contender.make(model), few)
    return steps


def plot(request: Request) -> Path:
    results, settings = Results("table4_left", request), SIZES[request.size]
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


RECIPE = Recipe("table4_left", "optimizers on ResNet20 and 32, accuracy and overhead (table 4, left)", run, plot, 19)

"""Table 4, right: Wide ResNets and MobileNetV1 by SGD, Adam and M-FAC, without tuning or weight decay.

Overheads of a step for WRN 22-2, 40-2, 22-4 and MobileNetV1 (for 32 x 32 images) on batches of 256, with windows of 64
and 128 gradients (1,024 would take up to 18 GB). The optimizer's part of a step is also timed alone: it grows linearly
with the window, so the paper's 1,024 is extrapolated from the two, and marked as such. Then 60 steps of WRN 22-2 on
CIFAR-10, batches of 64, with the paper's settings; no search, as in the paper. 18 minutes of one core.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import data, drawing
from experiments.contenders import plain_contenders
from experiments.models.mobilenet import MobileNetV1
from experiments.models.wide_resnet import WideResNet
from experiments.recipe import Recipe, Results
from experiments.step_times import overheads, step_of, take_turns

PAPER_WINDOW, TRAINED = 1024, "WRN 22-2"
CONTINUED = f"M-FAC, {PAPER_WINDOW}, continued"
PAPER = {"WRN 22-2": 1.40, "WRN 40-2": 1.35, "WRN 22-4": 1.43, "MobileNetV1": 1.25}  # overheads of M-FAC


@dataclass(frozen=True)
class Settings:
    timed: tuple[str, ...] = tuple(PAPER)
    windows: tuple[int, ...] = (64, 128)
    rounds: int = 2
    timed_batch: int = 256
    steps: int = 60
    batch_size: int = 64
    test_images: int = 5000
    tiny: bool = False


def make_model(name: str, settings: Settings) -> nn.Module:
    if name == "MobileNetV1":
        model: nn.Module = MobileNetV1(10, width=0.25 if settings.tiny else 1.0)
    else:
        depth, width = map(int, name.removeprefix("WRN ").split("-"))
        model = WideResNet(*((10, 1) if settings.tiny else (depth, width)))
    return model.to(memory_format=torch.channels_last)


def measure(results: Results, settings: Settings) -> None:
    for name in settings.timed:
        results.row(f"overheads, {name}", partial(timed, name, settings))
        results.row(f"alone, {name}", partial(alone, name, settings))
    for label, contender in plain_contenders(settings.windows[-1], settings.batch_size).items():
        run = partial(contender.train, partial(make_model, TRAINED, settings), 1, settings.steps, settings.test_images)
        results.row(f"run, {TRAINED}, {label}", run)


def timed(name: str, settings: Settings) -> dict[str, Any]:
    """SGD, Adam and M-FAC take turns on the same batches; only one window is in memory at a time."""
    few = list(itertools.islice(data.cifar_batches(settings.timed_batch, data.CIFAR10, seed=3), settings.rounds + 1))
    found: dict[str, Any] = {}
    seconds: dict[str, Any] = {}
    for window in settings.windows:
        steps = {}
        for label, contender in plain_contenders(window).items():
            if label == "Adam" and window != settings.windows[0]:
                continue
            torch.manual_seed(0)
            model = make_model(name, settings)
            steps[label] = step_of(model, replace(contender, lr=1e-3).make(model), few)
        times = take_turns(steps, settings.rounds)
        seconds[f"window of {window}"] = times
        found |= {label if label != "M-FAC" else f"M-FAC, {window}": value
                  for label, value in overheads(times, "SGD").items()}  # fmt: skip
    weights = sum(p.numel() for p in make_model(name, settings).parameters())
    return {
        "steps": found, "seconds": seconds, "weights": weights, "paper": PAPER[name],
        "window_bytes_1024": 4 * PAPER_WINDOW * weights,
    }  # fmt: skip


def alone(name: str, settings: Settings) -> dict[str, Any]:
    """Seconds of the optimizer's part of a step: whole steps vary more than the optimizers differ."""
    best: dict[str, float] = {}
    for window in settings.windows:
        for label in ("SGD", "M-FAC"):
            model = make_model(name, settings)
            optimizer = plain_contenders(window)[label].make(model)
            step_of(model, optimizer, [])  # fills the window
            for p in model.parameters():
                p.grad = torch.randn_like(p) * 1e-3
            times = take_turns({label: optimizer.step}, 5)[label]
            best[label if label == "SGD" else f"M-FAC, {window}"] = min(times)
            del optimizer
    measured = {w: best[f"M-FAC, {w}"] for w in settings.windows}
    return {"seconds": best | {CONTINUED: continue_line(measured, PAPER_WINDOW)}}


def continue_line(measured: dict[int, float], window: int) -> float:
    """The value at `window` on the line through the first and the last that were measured."""
    (m1, y1), *_, (m2, y2) = [*measured.items(), *measured.items()]
    return y2 if m1 == m2 else round(y1 + (y2 - y1) * (window - m1) / (m2 - m1), 4)


def over_sgd(cells: dict[str, Any], name: str) -> dict[str, float]:
    """A step of SGD with M-FAC's part in place of its own, relative to SGD's step."""
    whole = cells[f"overheads, {name}"]["steps"]["SGD"]["seconds_best"]
    parts = cells[f"alone, {name}"]["seconds"]
    return {label: 1 + (part - parts["SGD"]) / whole for label, part in parts.items() if label != "SGD"}


def draw(results: Results, settings: Settings) -> Path:
    groups: dict[str, dict[str, float]] = {}
    for key, cell in results.cells.items():
        name = key.removeprefix("overheads, ")
        if name != key and f"alone, {name}" in results.cells:
            groups[name] = over_sgd(results.cells, name) | {"M-FAC, the paper's": cell["paper"]}
            print(f"{name}: {groups[name]}")
        elif key.startswith("run, "):
            told = cell["tests"][-1] if cell["tests"] else "stopped"
            print(f"{key}: {told}, last loss {cell['losses'][-1] if cell['losses'] else None}")
    title = f"Overhead of a training step, batches of {settings.timed_batch}"
    return drawing.bars(results.picture, groups, y="seconds of a step over SGD's", title=title)


RECIPE = Recipe(
    "table4_right", "Wide ResNets and MobileNetV1, accuracy and overhead (table 4, right)", measure, draw, Settings(),
    Settings(("WRN 22-2", "MobileNetV1"), (2, 3), 1, 4, 2, 4, 100, tiny=True), minutes=18,
)  # fmt: skip

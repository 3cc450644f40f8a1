"""The time of a training step, as a ratio to SGD's in the same run: the optimizers take turns."""

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import nn

from experiments.training import compute_gradients, cross_entropy
from mfac.optimizer import WindowOptimizer


def fill_window(optimizer: WindowOptimizer, model: nn.Module) -> None:
    """With random gradients, without moving the weights: a step is cheaper while the window is not full."""
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(optimizer._window.operator.num_grads + 1):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) * 1e-3
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> Callable[[], None]:
    if isinstance(optimizer, WindowOptimizer):
        fill_window(optimizer, model)
    source = cycle(batches)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, next(source))
        compute_gradients(model, optimizer, loss)
        optimizer.step()

    return step


def take_turns(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of every step, round by round; a first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            seconds = processor_seconds(step)
            if number:
                times[name].append(seconds)
    return times


def processor_seconds(step: Callable[[], None]) -> float:
    """On one thread, which other processes disturb less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.process_time()
        step()
        return round(time.process_time() - began, 5)
    finally:
        torch.set_num_threads(threads)


def overheads(times: dict[str, list[float]], reference: str) -> dict[str, dict[str, Any]]:
    """{name: best seconds, median seconds, and both as ratios to those of the reference}."""
    found = {name: (min(values), sorted(values)[len(values) // 2]) for name, values in times.items()}
    best, median = found[reference]
    return {
        name: {"seconds_best": b, "seconds_median": m, "over_sgd": round(b / best, 4),
               "over_sgd_by_medians": round(m / median, 4)}
        for name, (b, m) in found.items()
    }  # fmt: skip

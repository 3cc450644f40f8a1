"""Figure: how close the sliding window's direction is to that of fresh gradients during training.

ResNet20 is trained by M-FAC on CIFAR-10. At intervals, F⁻¹g of the window (whose gradients are up to m steps old) is
compared with F⁻¹g of m gradients at the current weights, and that with another m. The gradients include the weight
decay, and are taken on copies of the model in training mode, like the window's.

Windows of 64 and 128 gradients, 384 steps, four comparisons each: 24 minutes of one core.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mfac
from experiments import data, drawing
from experiments.models.resnet import plain_resnet
from experiments.recipe import Recipe, Results
from experiments.training import cross_entropy, drops
from mfac.layout import ParameterLayout

LR, DAMPING, DECAY, PAPER_WINDOW = 1e-3, 1e-5, 3e-3, 512


@dataclass(frozen=True)
class Settings:
    windows: tuple[int, ...] = (128, 64)
    steps: int = 384
    every: int = 96
    batch_size: int = 128
    depth: int = 20


def measure(results: Results, settings: Settings) -> None:
    for m in settings.windows:
        results.row(f"m = {m}", partial(compared, m, settings))


def compared(m: int, settings: Settings) -> dict[str, Any]:
    """Trains, and compares at intervals; with normalize="sum" the paper's settings at m = 512 serve every m."""
    torch.manual_seed(1)
    batches, fresh = (endless(data.cifar_batches(settings.batch_size, data.CIFAR10, seed)) for seed in (1, 2))
    model = plain_resnet(settings.depth)
    damping = DAMPING * PAPER_WINDOW
    optimizer = mfac.MFAC(model.named_parameters(), LR * PAPER_WINDOW, m, damping, weight_decay=DECAY, normalize="sum")
    factor = drops(0.5, 0.75)
    rows, losses = [], []
    for t, batch in enumerate(itertools.islice(batches, settings.steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * PAPER_WINDOW * factor((t - 1) / settings.steps)
        model.train()
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        losses.append(round(loss.item(), 5))
        before = copy.deepcopy(model) if t % settings.every == 0 else None
        gradient = flat_gradient(model)
        optimizer.step()
        if before is not None:
            seen = optimizer._window.operator.num_seen
            rows.append(
                {"step": t, "loss": losses[-1], "window": seen, **similarities(optimizer, before, gradient, m, fresh)}
            )
            print(f"  {rows[-1]}", flush=True)
    return {"rows": rows, "losses": losses}


def similarities(
    optimizer: mfac.MFAC, model: nn.Module, gradient: Tensor, m: int, fresh: Iterator[Any]
) -> dict[str, float]:
    """Cosines between the directions of the window, of m fresh gradients, of another m, and the gradient itself."""
    operator = optimizer._window.operator
    window = operator @ gradient
    # The window has the damping of a sum of gradients, the static operator that of their mean.
    damping = operator.damping / m
    static = [mfac.StaticInverseFisher(fresh_rows(model, m, fresh), damping) @ gradient for _ in range(2)]
    pairs = {
        "dynamic-static": (window, static[0]),
        "static-static": (static[0], static[1]),
        "dynamic-gradient": (window, gradient),
        "static-gradient": (static[0], gradient),
    }
    return {name: round(float(F.cosine_similarity(a, b, 0)), 5) for name, (a, b) in pairs.items()}


def fresh_rows(model: nn.Module, m: int, batches: Iterator[Any]) -> Tensor:
    """m gradients with weight decay at the model's weights, in training mode (`collect_gradients` uses eval mode)."""
    model = copy.deepcopy(model).train()
    rows = []
    for batch in itertools.islice(batches, m):
        model.zero_grad()
        cross_entropy(model, batch).backward()
        rows.append(flat_gradient(model))
    return torch.stack(rows)


def flat_gradient(model: nn.Module) -> Tensor:
    """What enters the window: the gradient plus the decay."""
    layout = ParameterLayout.of_tensors(dict(model.named_parameters()))
    row = torch.empty(layout.dim)
    layout.flatten([p.grad + DECAY * p.detach() for p in model.parameters()], row)
    return row


def endless(batches: data.ImageBatches) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(batches))


def draw(results: Results, settings: Settings) -> Path:
    curves = {}
    for key, cell in results.cells.items():
        for pair in ("dynamic-static", "static-static"):
            curves[f"{pair}, {key}"] = drawing.curve((row["step"], row[pair]) for row in cell["rows"])
        print(key, *cell["rows"], sep="\n  ")
    return drawing.lines(
        results.picture, curves, x="step", y="cosine of two directions F⁻¹g",
        title="ResNet20 on CIFAR-10: the sliding window against fresh gradients",
    )  # fmt: skip


RECIPE = Recipe(
    "cosine_similarity", "the window's direction against fresh estimates (figure of the appendix)", measure, draw,
    Settings(), Settings((4,), 8, 4, 8, 8), minutes=15,
)  # fmt: skip

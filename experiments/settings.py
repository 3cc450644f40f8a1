"""The effect of damping, block size, gradients and recomputations: one-shot pruning of a small network on digits.

    python -m experiments.settings run     # 25 settings, five seeds each: some minutes on one core
    python -m experiments.settings plot    # docs/images/settings_digits.png, and the table

One setting is changed at a time; accuracy on the 360 held-out digits at 95 %, without fine-tuning. Each seed is a
different network, trained by the task itself.
"""

import argparse
import copy
from functools import cache
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from experiments import drawing
from experiments.ledger import IMAGES, Ledger
from mfac.app.runs.task_batches import measure
from mfac.app.tasks import load_task
from mfac.pruning import prune

SPARSITY, SEEDS = 0.95, 5
BASE: dict[str, Any] = {"num_grads": 64, "block_size": 128, "damping": 1e-5, "recomputations": 8}
VARIED: dict[str, list[Any]] = {
    "damping": [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, "auto"],
    "block_size": [1, 16, 64, 128, 512, None],
    "num_grads": [8, 32, 64, 256, 1024],
    "recomputations": [1, 2, 4, 8, 16, 32],
    "update": ["none", "obs", "joint"],
}
TASK = load_task("digits")
COMMAND = "python -m experiments.settings run"


def accuracy(model: nn.Module) -> float:
    return round(100 * (measure(TASK, model, torch.device("cpu"))["measure"] or 0.0), 2)


@cache
def trained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = TASK.model()
    assert TASK.pretrain is not None
    TASK.pretrain(model)
    return model


def measured(settings: dict[str, Any]) -> list[float]:
    """Accuracy in per cent, one number per seed."""
    found = []
    for seed in range(SEEDS):
        model = copy.deepcopy(trained(seed))
        torch.manual_seed(seed)
        prune(model, TASK.loss, TASK.train_batches(), SPARSITY, seed=seed, progress=False, **settings)
        found.append(accuracy(model))
    return found


def run() -> None:
    ledger = Ledger("settings_digits", COMMAND)
    ledger.cell("dense", lambda: [accuracy(trained(seed)) for seed in range(SEEDS)])
    for name, values in VARIED.items():
        for value in values:
            ledger.cell(f"{name} {value}", lambda n=name, v=value: measured(BASE | {n: v}))


def plot() -> None:
    cells = Ledger("settings_digits", COMMAND).cells
    for key, values in cells.items():
        print(f"| {key} | {mean(values):.1f} ± {stdev(values):.1f} |")  # mean and deviation of five networks
    figure, (panels,) = drawing.panels(1, len(VARIED), (12, 3.6), sharey=True)
    for axes, (name, values) in zip(panels, VARIED.items(), strict=True):
        means = [mean(cells[f"{name} {value}"]) for value in values]
        errors = [stdev(cells[f"{name} {value}"]) for value in values]
        axes.errorbar(range(len(values)), means, errors, fmt="o-", capsize=3, markersize=5)
        axes.axhline(mean(cells["dense"]), color="gray", linewidth=0.8, linestyle="--")
        labels = ["full" if value is None else f"{value:g}" if isinstance(value, float) else value for value in values]
        axes.set_xticks(range(len(values)), labels, rotation=60)
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel(f"accuracy at {SPARSITY:.0%} sparsity, %")
    drawing.save(figure, IMAGES / "settings_digits.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plot"])
    {"run": run, "plot": plot}[parser.parse_args().what]()


if __name__ == "__main__":
    main()

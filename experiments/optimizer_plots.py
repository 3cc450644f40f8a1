"""Pictures of the optimizer runs: loss by step and by second, accuracy by step, and windows of every length."""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from experiments.ledger import RESULTS

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = {"M-FAC": "#c0392b", "SGD, momentum": "#2c3e50", "Adam": "#2980b9", "AdamW": "#27ae60"}
TITLES = {
    "digits": "An MLP on scikit-learn's digits, mean of five seeds",
    "cifar10": "ResNet20 on CIFAR-10, three epochs of batches of 128",
}


def cells(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())["cells"]


def mean(columns: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*columns, strict=True)]


def smooth(values: list[float], width: int) -> list[float]:
    """Means over the last `width` values."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def plot_task(name: str) -> None:
    """Three panels: loss by step, loss by second, accuracy by step; one line an optimizer."""
    found = cells(f"optimizers_{name}")
    figure, (by_step, by_second, tested) = plt.subplots(1, 3, figsize=(13, 3.9))
    for label, colour in COLOURS.items():
        runs = [run for key, run in found.items() if key.startswith(f"run, {label}, ") and run["finished"]]
        if not runs:
            continue
        setting = next(key for key in found if key.startswith(f"run, {label}, "))
        setting = setting.removeprefix(f"run, {label}, ").rsplit(", seed", 1)[0]
        losses = smooth(mean([run["losses"] for run in runs]), 20)
        by_step.plot(losses, color=colour, label=f"{label} ({setting})")
        by_second.plot(mean([run["seconds"] for run in runs]), losses, color=colour)
        steps = [step for step, _ in runs[0]["tests"]]
        accuracies = mean([[value for _, value in run["tests"]] for run in runs])
        tested.plot(steps, accuracies, "o-", color=colour, markersize=4)
    for axis, x, y in (
        (by_step, "step", "training loss, mean of 20 steps"),
        (by_second, "seconds of one core", "training loss"),
        (tested, "step", "test accuracy, %"),
    ):
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
    by_step.set_yscale("log")
    by_second.set_yscale("log")
    figure.suptitle(TITLES[name])
    figure.legend(*by_step.get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(IMAGES / f"optimizers_{name}.png", dpi=110)
    plt.close(figure)


def plot_windows() -> None:
    """The last loss against m, with one learning rate and one damping, in both units."""
    found = cells("optimizers_windows")
    figure, axis = plt.subplots(figsize=(6, 4))
    windows = sorted({int(key.split("m ")[1].split(",")[0]) for key in found})
    for normalize, colour, label in (
        ("full", "#2c3e50", 'normalize="full", lr 1e-3, damping 1e-5'),
        ("sum", "#c0392b", 'normalize="sum", lr 0.5, damping 0.1'),
    ):
        for m in windows:
            runs = [run for key, run in found.items() if key.startswith(f"{normalize}, m {m},")]
            ends = [sum(run["losses"][-44:]) / 44 for run in runs if run["finished"]]
            axis.plot([m] * len(ends), ends, "o", color=colour, label=label if m == windows[0] else None)
    axis.set(
        xscale="log", yscale="log", xlabel="m, gradients in the window", ylabel="training loss of the last 44 steps"
    )
    axis.set_xticks(windows, map(str, windows))
    axis.set_title("One learning rate for every window: digits, three seeds", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(IMAGES / "optimizers_windows.png", dpi=110)
    plt.close(figure)

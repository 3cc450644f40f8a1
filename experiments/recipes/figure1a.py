"""Figure 1a and its ablations: accuracy after one-shot pruning for M-FAC, WoodFisher, magnitude and L-OBS.

Every point is pruned from the dense model, without any training afterwards; each gradient is of 16 images. The
ablations vary the number of gradients, the block size, and the number of recomputations (5 against 1) for M-FAC.

ResNet20 on CIFAR-10, 2,500 test images: 14 minutes on one core.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.image_task import ImageTask, resnet20_task
from experiments.recipe import Recipe, Results
from experiments.training import cross_entropy


@dataclass(frozen=True)
class Settings:
    sparsities: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7)
    num_grads: int = 64
    block_size: int = 128
    large_block: int = 2048  # of M-FAC among the methods
    gradients: tuple[int, ...] = (16, 64, 256)
    blocks: tuple[int | None, ...] = (16, 128, 1024, None)
    recomputations: tuple[int, ...] = (1, 5)
    batch_size: int = 16
    test_images: int = 2500
    tiny: bool = False


def rows(settings: Settings) -> dict[str, dict[str, Any]]:
    """{label: arguments of prune}: the figure's, WoodFisher with its own update; then those of the ablations."""
    m = settings.num_grads
    changes: dict[str, dict[str, Any]] = {
        "magnitude": {"method": "magnitude"},
        "L-OBS": {"method": "lobs", "scope": "layer"},
        "WoodFisher": {"method": "woodfisher", "update": "obs"},
        "M-FAC": {"block_size": settings.large_block},
    }
    changes |= {f"gradients: {count}": {"num_grads": count} for count in settings.gradients}
    changes |= {f"blocks of {block or 'all'}": {"block_size": block} for block in settings.blocks}
    changes |= {f"recomputations: {k}, gradients {m}": {"recomputations": k} for k in settings.recomputations}
    shared = {"num_grads": m, "block_size": settings.block_size, "recomputations": 1}
    return {label: shared | change for label, change in changes.items()}


def measure(results: Results, settings: Settings) -> None:
    task = resnet20_task(settings.test_images, augment=False, tiny=settings.tiny)
    results.cell("dense", lambda: task.test(task.model()))
    for label, arguments in rows(settings).items():
        results.row(label, partial(row, task, settings, arguments))


def row(task: ImageTask, settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for sparsity in settings.sparsities:
        model, batches = task.model(), task.batches(settings.batch_size, 0)
        result = prune(model, cross_entropy, batches, sparsity, seed=1, loss_batches=1, progress=False, **arguments)
        spent = sum(record.seconds - record.gradient_seconds for record in result.history)
        found[f"{sparsity:g}"] = task.test(model) | {"seconds_beyond_gradients": round(spent, 3)}
        print(f"  {sparsity:.0%}: {found[f'{sparsity:g}']}", flush=True)
    return {"points": found}


def draw(results: Results, settings: Settings) -> Path:
    figure, axes = drawing.panels(2, 2, (12, 8))
    methods = ("magnitude", "L-OBS", "WoodFisher", "M-FAC")
    panels = {"Methods": methods, "Gradients": "gradients:", "Block sizes": "blocks of",
              "Recomputations": "recomputations:"}  # fmt: skip
    for axis, (title, start) in zip(axes.flat, panels.items(), strict=True):
        labels = [label for label in rows(settings) if label in results.cells and label.startswith(start)]
        for number, label in enumerate(labels):
            points = results.cells[label]["points"]
            values = [point["accuracy"] for point in points.values()]
            axis.plot([100 * float(s) for s in points], values, label=label, **drawing.style(number))
            print(f"{label}:", *(f"{100 * float(s):g} % {v:.1f}," for s, v in zip(points, values, strict=True)))
        axis.axhline(results.cells["dense"]["accuracy"], color="0.6", linewidth=1, label="dense")
        axis.set(xlabel="sparsity, %", ylabel="test accuracy, %", title=title)
        axis.legend(fontsize=8)
    return drawing.save(figure, results.picture)


RECIPE = Recipe(
    "figure1a", "one-shot pruning, four methods, and the ablations (figure 1a, appendix)", measure, draw, Settings(),
    Settings((0.5,), 2, 16, 64, (2,), (16,), (2,), 4, 100, tiny=True), minutes=14,
)  # fmt: skip

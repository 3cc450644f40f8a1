"""Figure 1a and its ablations: accuracy after one-shot pruning for M-FAC, WoodFisher, magnitude and L-OBS.

Every point is pruned from the dense model, without any training afterwards; each gradient is of 16 images. The
ablations vary the number of gradients, the block size, and the number of recomputations (5 against 1) for M-FAC.

Small: ResNet20 on CIFAR-10, 2,500 test images: 14 minutes on one core. Full: ResNet50 on ImageNet (top-5 accuracy as
in the paper, and top-1), --images FOLDER --checkpoint FILE of a trained ResNet50.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.image_task import ImageTask, image_task
from experiments.recipe import Recipe, Request, Results
from experiments.training import cross_entropy


@dataclass(frozen=True)
class Settings:
    sparsities: tuple[float, ...]
    shared: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    gradients: tuple[int, ...]
    blocks: tuple[int | None, ...]
    recomputations: tuple[tuple[int, int], ...]  # (recomputations, gradients)
    batch_size: int = 16
    test_images: int = 10_000


def compared_methods(block: int | None, woodfisher: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{label: changes to `shared`}; WoodFisher with its own update, L-OBS layer by layer."""
    return {
        "magnitude": {"method": "magnitude"},
        "L-OBS": {"method": "lobs", "scope": "layer"},
        "WoodFisher": {"method": "woodfisher", "update": "obs", **woodfisher},
        "M-FAC": {"method": "mfac", "block_size": block},
    }


SIZES = {
    "full": Settings(
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), {"num_grads": 1000, "damping": 1e-5, "recomputations": 1, "block_size": 10_000},
        compared_methods(100_000, {"block_size": 2000, "num_grads": 400}),
        (50, 200, 400, 1000, 2000, 4000), (2000, 10_000, 50_000, None),
        ((1, 200), (5, 200), (1, 1000), (5, 1000)),
    ),
    "small": Settings(
        (0.4, 0.5, 0.6, 0.7), {"num_grads": 64, "damping": 1e-5, "recomputations": 1, "block_size": 128},
        compared_methods(2048, {"block_size": 128}),
        (16, 64, 256), (16, 128, 1024, None), ((1, 64), (5, 64)), test_images=2500,
    ),
    "smoke": Settings(
        (0.5,), {"num_grads": 2, "damping": 1e-5, "recomputations": 1, "block_size": 16},
        compared_methods(64, {"block_size": 16}), (2,), (16,), ((2, 2),), batch_size=4, test_images=100,
    ),
}  # fmt: skip


def rows(settings: Settings) -> dict[str, dict[str, Any]]:
    """{label: arguments of prune}: the figure's, then those of the ablations."""
    changes = dict(settings.methods)
    changes |= {f"gradients: {m}": {"num_grads": m} for m in settings.gradients}
    changes |= {f"blocks of {block or 'all'}": {"block_size": block} for block in settings.blocks}
    changes |= {f"recomputations: {k}, gradients {m}": {"recomputations": k, "num_grads": m}
                for k, m in settings.recomputations}  # fmt: skip
    return {label: settings.shared | change for label, change in changes.items()}


def run(request: Request) -> None:
    results, settings = Results("figure1a", request), SIZES[request.size]
    results.settings(sparsities=settings.sparsities, batch_size=settings.batch_size, rows=rows(settings))
    task = image_task(request, settings.test_images, augment=False, name="resnet50")
    results.cell("dense", lambda: task.test(task.model()))
    for label, arguments in rows(settings).items():
        if request.wants(label):
            results.cell(label, lambda a=arguments: row(task, settings, a))


def row(task: ImageTask, settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for sparsity in settings.sparsities:
        model, batches = task.model(), task.batches(settings.batch_size, 0)
        result = prune(model, cross_entropy, batches, sparsity, seed=1, loss_batches=1, progress=False, **arguments)
        spent = sum(record.seconds - record.gradient_seconds for record in result.history)
        found[f"{sparsity:g}"] = task.test(model) | {"seconds_beyond_gradients": round(spent, 3)}
        print(f"  {sparsity:.0%}: {found[f'{sparsity:g}']}", flush=True)
    return {"points": found}


def plot(request: Request) -> Path:
    results, settings = Results("figure1a", request), SIZES[request.size]
    figure, axes = drawing.panels(2, 2, (12, 8))
    panels = {"Methods": tuple(settings.methods), "Gradients": "gradients:", "Block sizes": "blocks of",
              "Recomputations": "recomputations:"}  # fmt: skip
    key = "top5" if request.size == "full" else "accuracy"
    for axis, (title, start) in zip(axes.flat, panels.items(), strict=True):
        labels = [label for label in rows(settings) if label in results.cells and label.startswith(start)]
        for number, label in enumerate(labels):
            points = results.cells[label]["points"]
            values = [point[key] for point in points.values()]
            axis.plot([100 * float(s) for s in points], values, label=label, **drawing.style(number))
            print(f"{label}:", *(f"{100 * float(s):g} % {v:.1f}," for s, v in zip(points, values, strict=True)))
        axis.axhline(results.cells["dense"][key], color="0.6", linewidth=1, label="dense")
        axis.set(xlabel="sparsity, %", ylabel=f"test accuracy{' (top 5)' if key == 'top5' else ''}, %", title=title)
        axis.legend(fontsize=8)
    return drawing.save(figure, results.picture)


RECIPE = Recipe("figure1a", "one-shot pruning, four methods, and the ablations (figure 1a, appendix)", run, plot, 14)

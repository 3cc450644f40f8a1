"""Figure 1a and its ablations: accuracy after one-shot pruning for M-FAC, WoodFisher, magnitude and L-OBS.

Every point is pruned from the dense model, without any training after it; gradients are of 16 images each. The
ablations vary the number of gradients, the block size, and the number of recomputations (5 against 1) for M-FAC.

Small: ResNet20 on CIFAR-10, 2,500 test images: 14 minutes on one core. Full: ResNet50 on ImageNet (top-5 accuracy as
in the paper, top-1 besides), --images FOLDER --checkpoint FILE of a trained ResNet50.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import mfac
from experiments import data, drawing
from experiments.cifar_images import cifar10, untrained_resnet8
from experiments.imagenet import folder_batches, load_weights, tester
from experiments.models.resnet import mfac_resnet20
from experiments.models.resnet50 import ResNet50
from experiments.recipe import Recipe, Request, Results

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


@dataclass(frozen=True)
class Settings:
    """What is compared: {label: changes to `shared`} for each of the figures."""

    sparsities: tuple[float, ...]
    shared: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    gradients: tuple[int, ...]
    blocks: tuple[int | None, ...]
    recomputations: tuple[tuple[int, int], ...]  # (recomputations, gradients)
    batch_size: int = 16
    test_images: int = 10_000


def compared_methods(block: int | None, woodfisher: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The four of the figure; WoodFisher with its own update, L-OBS layer by layer."""
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
    make_model, batches, test = imagenet_task(request) if request.size == "full" else cifar_task(request, settings)
    results.cell("dense", lambda: test(make_model()))
    for label, arguments in rows(settings).items():
        if request.wants(label):
            results.cell(label, lambda a=arguments: row(make_model, batches, test, settings.sparsities, a))


def row(
    make_model: Callable[[], nn.Module], batches: Callable[[], Any], test: Any, sparsities: Any, arguments: dict
) -> dict[str, Any]:
    """One method at every sparsity."""
    found = {}
    for sparsity in sparsities:
        model = make_model()
        result = mfac.prune(model, LOSS, batches(), sparsity, seed=1, loss_batches=1, progress=False, **arguments)
        spent = sum(record.seconds - record.gradient_seconds for record in result.history)
        found[f"{sparsity:g}"] = test(model) | {"seconds_beyond_gradients": round(spent, 3)}
        print(f"  {sparsity:.0%}: {found[f'{sparsity:g}']}", flush=True)
    return {"points": found}


def cifar_task(request: Request, settings: Settings) -> tuple[Callable[[], nn.Module], Callable[[], Any], Any]:
    """The trained ResNet20; for a smoke test an untrained ResNet8."""
    train = cifar10("train")
    images, labels = (part[: settings.test_images] for part in cifar10("test"))
    held_out = data.ImageBatches(images, labels, 100, data.HALVES)
    return (
        untrained_resnet8 if request.size == "smoke" else mfac_resnet20,
        lambda: data.ImageBatches(*train, settings.batch_size, data.HALVES, seed=0),
        lambda model: {"accuracy": data.accuracy(model, held_out)},
    )


def imagenet_task(request: Request) -> tuple[Callable[[], nn.Module], Callable[[], Any], Any]:
    """A trained ResNet50."""
    return (
        lambda: load_weights(request.weights(), ResNet50()),
        lambda: folder_batches(request, "train", 16, 0),
        tester(request),
    )


def plot(request: Request) -> Path:
    results, settings = Results("figure1a", request), SIZES[request.size]
    plt = drawing.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    panels = (
        ("Methods", settings.methods), ("Gradients", "gradients:"), ("Block sizes", "blocks of"),
        ("Recomputations", "recomputations:"),
    )  # fmt: skip
    key = "top5" if request.size == "full" else "accuracy"
    for axis, (title, chosen) in zip(axes.flat, panels, strict=True):
        labels = [label for label in rows(settings) if label in results.cells and _belongs(label, chosen)]
        for number, label in enumerate(labels):
            points = results.cells[label]["points"]
            values = [point[key] for point in points.values()]
            axis.plot([100 * float(s) for s in points], values, label=label, **drawing.style(number))
            print(
                f"{label}: " + ", ".join(f"{100 * float(s):g} % {v:.1f}" for s, v in zip(points, values, strict=True))
            )
        axis.axhline(results.cells["dense"][key], color="0.6", linewidth=1, label="dense")
        axis.set(xlabel="sparsity, %", ylabel=f"test accuracy{' (top 5)' if key == 'top5' else ''}, %", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return drawing.save(figure, results.picture())


def _belongs(label: str, chosen: Any) -> bool:
    return label.startswith(chosen) if isinstance(chosen, str) else label in chosen


RECIPE = Recipe("figure1a", "one-shot pruning, four methods, and the ablations (figure 1a, appendix)", run, plot, 14)

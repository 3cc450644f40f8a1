"""Table 4, right, last rows: fine-tuning a sparse model, SGD against M-FAC with masks; overhead of a step.

A ResNet20 pruned to 90 % is tuned with the paper's hyper-parameters: learning rate 0.005, a tenth of it after each
third, batches of 256. M-FAC's window of 512 gradients holds only the kept weights; its learning rate is in the paper's
units, in which a step grows with m. The optimizers take turns when they are timed, with a full window.

100 steps each: 8 minutes on one core.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mfac
from experiments import data, drawing
from experiments.baselines.pruning import PAPER
from experiments.image_task import ImageTask, resnet20_task
from experiments.recipe import Recipe, Results
from experiments.step_times import overheads, step_of, take_turns
from experiments.training import RUNS, Training, cross_entropy, drops
from mfac.pruning import attach_masks, masks_from_zeros

RATE, WINDOW, DAMPING = 0.005, 512, 1e-5


@dataclass(frozen=True)
class Settings:
    steps: int = 100
    rounds: int = 12
    sparsity: float = 0.9
    num_grads: int = 64
    recomputations: int = 16
    window: int = WINDOW
    batch_size: int = 256
    test_images: int = 5000
    tiny: bool = False


def measure(results: Results, settings: Settings) -> None:
    if results.cells.keys() >= {"before", *filter(results.wants, ("SGD", "M-FAC", "overhead"))}:
        return  # nothing to prune for
    task = pruned_task(settings, results.path.parent if settings.tiny else RUNS)
    masks = masks_from_zeros(task.model())
    kept = sum(int(mask.sum()) for mask in masks.values())
    results.cell("before", lambda: {**task.test(task.model()), "kept": kept})
    for optimizer in ("SGD", "M-FAC"):
        results.row(optimizer, partial(tuned, optimizer, masks, task, settings))
    results.row("overhead", partial(overhead, masks, task, settings))


def make_optimizer(name: str, model: nn.Module, masks: dict[str, Tensor], window: int) -> torch.optim.Optimizer:
    """SGD with momentum, zeros kept by a hook; or M-FAC with the masks in its window."""
    if name == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        attach_masks(optimizer, masks, model)
        return optimizer
    # In the units of the sum, so that a smaller window keeps the length of steps that 512 gradients have.
    return mfac.MFAC(model.named_parameters(), RATE * WINDOW, window, DAMPING * WINDOW, normalize="sum", masks=masks)


def tuned(name: str, masks: dict[str, Tensor], task: ImageTask, settings: Settings) -> dict[str, Any]:
    model = task.model()
    training = Training(
        model, make_optimizer(name, model, masks, settings.window), task.batches(settings.batch_size, 1),
        settings.steps, drops(1 / 3, 2 / 3), test=task.test, test_every=max(1, settings.steps // 5),
    )  # fmt: skip
    record = training.run()
    named = dict(model.named_parameters())
    assert all(not named[key][~mask].count_nonzero() for key, mask in masks.items())
    return record


def overhead(masks: dict[str, Tensor], task: ImageTask, settings: Settings) -> dict[str, Any]:
    few = list(itertools.islice(task.batches(settings.batch_size, 2), settings.rounds + 1))
    steps = {}
    for name in ("SGD", "M-FAC"):
        model = task.model()
        steps[name] = step_of(model, make_optimizer(name, model, masks, settings.window), few)
    times = take_turns(steps, settings.rounds)
    return {"steps": overheads(times, "SGD"), "seconds": times, "target": 1.05, "paper": {"MBv1": 1.03, "RN50": 1.05}}


def pruned_task(settings: Settings, folder: Path) -> ImageTask:
    """ResNet20 pruned, once; its file is kept."""
    task = resnet20_task(settings.test_images, tiny=settings.tiny)
    path = folder / f"resnet20_pruned_{settings.sparsity:g}_{settings.num_grads}_{settings.recomputations}.pt"
    if not path.exists():
        model = task.model()
        images = data.cifar_batches(32, data.HALVES, seed=0, augment=False)
        mfac.prune(model, cross_entropy, images, settings.sparsity, seed=1, progress=False,
                   **PAPER | {"num_grads": settings.num_grads, "recomputations": settings.recomputations})  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)

    def make_model() -> nn.Module:
        model = task.model()
        model.load_state_dict(torch.load(path, weights_only=True))
        return model

    return task._replace(model=make_model)


def draw(results: Results, settings: Settings) -> Path:
    curves = {}
    for name in ("SGD", "M-FAC"):
        if name in results.cells:
            tests = [{"step": 0, "accuracy": results.cells["before"]["accuracy"]}, *results.cells[name]["tests"]]
            curves[name] = drawing.curve((t["step"], t["accuracy"]) for t in tests)
            print(f"{name}: {[round(t['accuracy'], 2) for t in tests]}")
    told = ""
    if "overhead" in results.cells:
        found = results.cells["overhead"]["steps"]["M-FAC"]
        told = f"; a step of M-FAC takes {found['over_sgd']:.3f} of SGD's"
        print(found)
    title = f"ResNet20 at 90 % sparsity, tuned{told}"
    return drawing.lines(results.picture, curves, x="step", y="test accuracy, %", title=title)


RECIPE = Recipe(
    "sparse_tuning", "fine-tuning of sparse models, overhead of masks (table 4, right)", measure, draw, Settings(),
    Settings(2, 1, 0.9, 2, 1, 4, 8, 100, tiny=True), minutes=8,
)  # fmt: skip

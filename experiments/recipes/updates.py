"""Table of the appendix: no update, simultaneous OBS and joint removal, ResNet20 in steps of 10 % to 90 %.

Both sizes are `python -m experiments.one_shot_pruning updates`, and share its file of results. Small: 64 gradients and
2,500 test images: 9 minutes on one core. Full: the paper's 1,024 gradients and all images.
"""

from pathlib import Path
from typing import Any

import mfac
from experiments import data, drawing, one_shot_pruning
from experiments.cifar_images import cifar10, untrained_resnet8
from experiments.ledger import Ledger
from experiments.pruned_resnet import LOSS
from experiments.recipe import Recipe, Request, run_module

SIZES = {"full": (1024, 10_000), "small": (64, 2500), "smoke": (2, 100)}
UPDATES = {"none": "no update", "obs": "simultaneous OBS", "joint": "joint removal"}


def run(request: Request) -> None:
    num_grads, images = SIZES[request.size]
    if request.size != "smoke":
        size = ("--num-grads", str(num_grads), "--test-images", str(images))
        for row in filter(request.wants, (*UPDATES, "joint, statistics left")):
            run_module("one_shot_pruning", "updates", *size, "--only", row)
        return
    request.folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger("one_shot_updates", "", request.folder)
    for update in UPDATES:
        key = f"{update}, {num_grads} gradients, {images} test images"
        ledger.cell(key, lambda update=update: smoke_row(update, num_grads, images))


def smoke_row(update: str, num_grads: int, images: int) -> dict[str, Any]:
    """The steps of a row on a small untrained network."""
    model, masks, found = untrained_resnet8(), None, []
    batches = data.ImageBatches(*cifar10("train"), 4, data.HALVES, seed=0)
    test = data.ImageBatches(*(part[:images] for part in cifar10("test")), 100, data.HALVES)
    for tenths in range(1, 10):
        result = mfac.prune(
            model, LOSS, batches, tenths / 10, update=update, num_grads=num_grads, block_size=None,
            recomputations=1, loss_batches=1, masks=masks, progress=False,
        )  # fmt: skip
        masks = result.masks
        found.append(data.accuracy(model, test))
    return {"accuracy": found, "paper": one_shot_pruning.PAPER[update]}


def plot(request: Request) -> Path:
    num_grads, images = SIZES[request.size]
    cells = Ledger("one_shot_updates", "", request.folder).cells
    tenths = [10.0 * i for i in range(1, 10)]
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for update, told in UPDATES.items():
        cell = cells.get(f"{update}, {num_grads} gradients, {images} test images")
        if cell:
            curves[told] = (tenths, list(cell["accuracy"]))
            print(f"{told}: {[round(v, 1) for v in cell['accuracy']]}; the paper {list(cell['paper'])}")
        curves[f"{told}, the paper's (1,024 gradients)"] = (tenths, list(one_shot_pruning.PAPER[update]))
    return drawing.lines(
        request.folder / f"updates_{request.size}.png", curves, x="sparsity, %", y="test accuracy, %",
        title=f"ResNet20 on CIFAR-10, the full matrix of {num_grads} gradients, anew after every 10 %",
    )  # fmt: skip


RECIPE = Recipe("updates", "OBD, simultaneous OBS, joint removal (table of the appendix)", run, plot, minutes=9)

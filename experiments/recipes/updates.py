"""Table of the appendix: no update, simultaneous OBS and joint removal, ResNet20 in steps of 10 % to 90 %.

The rows are those of `python -m experiments.one_shot_pruning updates`, in the same file. Small: 64 gradients and 2,500
test images: 9 minutes on one core. Full: the paper's 1,024 gradients and all images.
"""

from pathlib import Path

from experiments import drawing, one_shot_pruning
from experiments.image_task import untrained_resnet8
from experiments.ledger import Ledger
from experiments.models.resnet import mfac_resnet20
from experiments.recipe import Recipe, Request

SIZES = {"full": (1024, 10_000), "small": (64, 2500), "smoke": (2, 100)}
UPDATES = {"none": "no update", "obs": "simultaneous OBS", "joint": "joint removal"}


def run(request: Request) -> None:
    smoke = request.size == "smoke"
    for row in filter(request.wants, (*(() if smoke else UPDATES), "joint, statistics left")):
        make_model = untrained_resnet8 if smoke else mfac_resnet20
        one_shot_pruning.updates(*SIZES[request.size], row, request.folder, make_model)


def plot(request: Request) -> Path:
    num_grads, images = SIZES[request.size]
    cells = Ledger("one_shot_updates", "", request.folder).cells
    tenths = [10.0 * i for i in range(1, 10)]
    curves: dict[str, drawing.Curve] = {}
    for update, told in UPDATES.items():
        cell = cells.get(f"{update}, {num_grads} gradients, {images} test images")
        if cell:
            curves[told] = (tenths, list(cell["accuracy"]))
            print(f"{told}: {[round(v, 1) for v in cell['accuracy']]}; the paper {list(cell['paper'])}")
        curves[f"{told}, the paper's (1,024 gradients)"] = (tenths, list(one_shot_pruning.PAPER[update]))
    return drawing.lines(
        request.folder / f"updates_{request.size}.png", curves, x="sparsity, %", y="test accuracy, %",
        title=f"ResNet20 on CIFAR-10, full matrix of {num_grads} gradients, recomputed after every 10 %",
    )  # fmt: skip


RECIPE = Recipe("updates", "OBD, simultaneous OBS, joint removal (table of the appendix)", run, plot, minutes=9)

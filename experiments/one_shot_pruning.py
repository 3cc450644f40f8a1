"""One-shot pruning of ResNet20 on CIFAR-10 in the paper's way, without any fine-tuning: a table of the appendix.

    python -m experiments.one_shot_pruning     # none, obs and joint on the full matrix, steps of 10 %

With 64 gradients and 2,500 test images it is the recipe `updates`: 9 minutes on one core.
`experiments.pruning_comparison` compares methods. Every cell is saved with its settings as soon as it is done; an
interrupted command resumes. Seconds are processor time of one thread, without evaluation.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from experiments import data, drawing
from experiments.baselines.pruning import prune
from experiments.image_task import untrained_resnet8
from experiments.models.resnet import mfac_resnet20
from experiments.recipe import Recipe, Request, Results
from experiments.training import cross_entropy
from mfac.pruning import PruningResult

COMMAND = "python -m experiments.one_shot_pruning"
PAPER = {  # Table 6 of the paper: accuracy at 10, 20, ..., 90 %
    "none": (91.4, 91.3, 91.0, 90.2, 88.4, 84.8, 77.2, 50.4, 11.5),
    "obs": (91.4, 91.4, 91.5, 91.2, 90.8, 89.7, 86.8, 75.6, 28.2),
    "joint": (91.5, 91.4, 91.4, 91.2, 90.7, 89.7, 87.5, 75.7, 28.1),
}
UPDATES = {"joint": "joint removal", "obs": "simultaneous OBS", "none": "no update"}


@dataclass(frozen=True)
class Settings:
    num_grads: int = 64
    images: int = 2500
    rows: tuple[str, ...] = (*UPDATES, "joint, statistics left")
    tiny: bool = False

    def key(self, row: str) -> str:
        return f"{row}, {self.num_grads} gradients, {self.images} test images"


def updates(results: Results, settings: Settings) -> None:
    """The paper's table of three updates: the full matrix, gradients of 16 images, recomputed after every 10 %.

    Batch-norm statistics are re-estimated after each step; the last row is without that.
    """
    for row in filter(results.wants, settings.rows):
        results.cell(settings.key(row), partial(_update_row, row, settings))


def _update_row(name: str, settings: Settings) -> dict[str, Any]:
    update, _, left = name.partition(", ")
    model, masks, row = untrained_resnet8() if settings.tiny else mfac_resnet20(), None, []
    for tenths in range(1, 10):
        result, cell = pruned(
            model, tenths / 10, masks=masks, update=update, num_grads=settings.num_grads, block_size=None,
            recomputations=1, bn_batches=None if left else bn_batches(),
        )  # fmt: skip
        masks = result.masks
        row.append({"accuracy": accuracy_on_test(model, settings.images)} | cell)
        print(f"  {update} {tenths}0 %: {row[-1]['accuracy']:.2f} (paper {PAPER[update][tenths - 1]})", flush=True)
    return {"accuracy": [cell["accuracy"] for cell in row], "paper": PAPER[update], "steps": row}


def draw_updates(results: Results, settings: Settings) -> Path:
    tenths = [10.0 * i for i in range(1, 10)]
    curves: dict[str, drawing.Curve] = {}
    for update, told in UPDATES.items():
        if cell := results.cells.get(settings.key(update)):
            curves[told] = (tenths, list(cell["accuracy"]))
            print(f"{told}: {[round(v, 1) for v in cell['accuracy']]}; the paper {list(cell['paper'])}")
        curves[f"{told}, the paper's (1,024 gradients)"] = (tenths, list(PAPER[update]))
    title = f"ResNet20 on CIFAR-10, full matrix of {settings.num_grads} gradients, recomputed after every 10 %"
    return drawing.lines(results.picture, curves, x="sparsity, %", y="test accuracy, %", title=title)


RECIPE = Recipe(
    "updates", "no update, simultaneous OBS, joint removal (table of the appendix)", updates, draw_updates, Settings(),
    Settings(2, 100, ("joint, statistics left",), tiny=True), 9, "one_shot_updates",
    f"{COMMAND} --num-grads 64 --test-images 2500",
)  # fmt: skip


def accuracy_on_test(model: nn.Module, images: int = 10_000) -> float:
    return data.make_test(data.HALVES, images)(model)["accuracy"]


def pruned(model: nn.Module, sparsity: float, **settings: Any) -> tuple[PruningResult, dict[str, Any]]:
    """Prunes the model by batches of 16 images; the result, and the cell without accuracy."""
    start = time.process_time()
    # Later stages of a run must not see the same images again.
    seed = 0 if settings.get("masks") is None else round(100 * sparsity)
    batches = data.cifar_batches(16, data.HALVES, seed, augment=False)
    result = prune(model, cross_entropy, batches, sparsity, seed=1, progress=False, **settings)
    seconds = time.process_time() - start
    told = {key: value for key, value in settings.items() if key not in ("masks", "bn_batches")}
    return result, {
        "settings": {"recalibrated": settings.get("bn_batches") is not None, **told},
        "sparsity": result.sparsity,
        "seconds": round(seconds, 1),
        "loss": [result.history[0].loss_before, result.history[-1].loss_after],
        "predicted_increase": result.predicted_increase,
        "damping": result.damping,
    }


def bn_batches() -> data.ImageBatches:
    """2,000 images for batch-norm statistics, augmented as in training."""
    images, labels = (part[:2000] for part in data.cifar10("train"))
    return data.ImageBatches(images, labels, 100, data.HALVES, seed=5, augment=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-grads", type=int, default=1024, help="the paper has 1024")
    parser.add_argument("--test-images", type=int, default=10_000, help="10,000 are all")
    given = parser.parse_args()
    command = f"{COMMAND} --num-grads {given.num_grads} --test-images {given.test_images}"
    updates(Results("one_shot_updates", command, Request()), Settings(given.num_grads, given.test_images))


if __name__ == "__main__":
    main()

"""One-shot pruning of ResNet20 on CIFAR-10, without any fine-tuning: accuracy on the test images.

    python -m experiments.one_shot_pruning defaults       # mfac.prune with its defaults, at 80 and 90 %
    python -m experiments.one_shot_pruning best           # the best settings found
    python -m experiments.one_shot_pruning updates        # none, obs and joint on the full matrix, steps of 10 %
    python -m experiments.one_shot_pruning methods        # M-FAC against the baselines at 50, 70, 80 and 90 %
    python -m experiments.one_shot_pruning two_four       # 2:4 on ResNet20 and on a small BERT
    python -m experiments.one_shot_pruning recalibration  # batch-norm statistics: left, at the end, after every step
    python -m experiments.one_shot_pruning ablation       # block sizes, gradients, damping, recomputations at 90 %
    python -m experiments.one_shot_pruning plot           # accuracy against sparsity

Every cell is saved with its settings as soon as it is done; an interrupted command resumes. Seconds are processor time
of one thread, without evaluation. Memory is the peak of the process so far; `methods` starts a process for each row.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.ledger import IMAGES, RESULTS, Ledger
from experiments.models.resnet import mfac_resnet20
from experiments.pruned_resnet import accuracy_on_test, bn_batches, measured, pruned
from experiments.tasks import glue_stsb
from mfac.pruning import PruningResult

COMMAND = "python -m experiments.one_shot_pruning"
PAPER = {  # Table 6 of the paper: accuracy at 10, 20, ..., 90 %
    "none": (91.4, 91.3, 91.0, 90.2, 88.4, 84.8, 77.2, 50.4, 11.5),
    "obs": (91.4, 91.4, 91.5, 91.2, 90.8, 89.7, 86.8, 75.6, 28.2),
    "joint": (91.5, 91.4, 91.4, 91.2, 90.7, 89.7, 87.5, 75.7, 28.1),
}
# Hardly anything is lost before 60 %, so the effort goes into what comes after. `stages`: {sparsity: gradients, of 16
# augmented images by default, for each of the 8 recomputations that lead to it}.
BEST: dict[str, dict[str, Any]] = {
    "60, 80, 90 %": {"stages": {0.8: 128, 0.9: 256}},
    "60, 80, 90 %, four times the gradients, of 4 images": {
        "stages": {0.8: 512, 0.9: 1024}, "batch_size": 4, "damping": 5e-5
    },
    "60, 80, 90 %, statistics re-estimated": {"stages": {0.8: 128, 0.9: 256}, "recalibrated": True},
    "60, 80 %, K-FAC, statistics re-estimated": {
        "stages": {0.8: 32}, "recalibrated": True, "method": "kfac", "augment": False
    },
}  # fmt: skip


def defaults() -> None:
    """64 gradients of 32 images, 16 recomputations."""
    ledger = Ledger("one_shot_defaults", f"{COMMAND} defaults")
    ledger.cell("dense", lambda: {"accuracy": accuracy_on_test(mfac_resnet20())})
    for sparsity in (0.8, 0.9):
        ledger.cell(f"{sparsity:.0%}", lambda sparsity=sparsity: measured(sparsity, 32))


def best(only: str | None) -> None:
    """60 % in two recomputations, 80 % in eight more, 90 % in eight more with more gradients."""
    ledger = Ledger("one_shot_best", f"{COMMAND} best")
    for key, row in BEST.items():
        if only in (None, key):
            ledger.cell(key, lambda row=row: _best_row(**row))


def _best_row(stages: dict[float, int], recalibrated: bool = False, method: str = "mfac", augment: bool = True,
              batch_size: int = 16, damping: float = 2e-5) -> dict[str, Any]:  # fmt: skip
    model = mfac_resnet20()
    shared = {"method": method, "bn_batches": bn_batches() if recalibrated else None}
    result, cell = pruned(model, 0.6, 32, augment, recomputations=2, **shared)
    row = {"60%": {"accuracy": accuracy_on_test(model, 2500), "test_images": 2500} | cell}
    shared |= {"recomputations": 8, "damping": damping}
    for sparsity, num_grads in stages.items():
        result, cell = pruned(model, sparsity, batch_size, augment, masks=result.masks, num_grads=num_grads, **shared)
        row[f"{sparsity:.0%}"] = {"accuracy": accuracy_on_test(model)} | cell
        print(f"  {sparsity:.0%}: {row[f'{sparsity:.0%}']['accuracy']:.2f}", flush=True)
    return row


def updates(num_grads: int, images: int, only: str | None, folder: Path = RESULTS,
            make_model: Callable[[], nn.Module] = mfac_resnet20) -> None:  # fmt: skip
    """The paper's table of three updates: the full matrix, gradients of 16 images, recomputed after every 10 %.

    Batch-norm statistics are re-estimated after each step; the last row is without that.
    """
    command = f"{COMMAND} updates --num-grads {num_grads} --test-images {images}"
    ledger = Ledger("one_shot_updates", command, folder)
    for update, recalibrated in (("joint", True), ("obs", True), ("none", True), ("joint", False)):
        name = update if recalibrated else f"{update}, statistics left"
        if only in (None, name):
            key = f"{name}, {num_grads} gradients, {images} test images"
            ledger.cell(key, lambda u=update, r=recalibrated: _update_row(make_model(), u, num_grads, images, r))


def _update_row(model: nn.Module, update: str, num_grads: int, images: int, recalibrated: bool) -> dict[str, Any]:
    masks, row = None, []
    settings = {"update": update, "num_grads": num_grads, "block_size": None, "recomputations": 1}
    for tenths in range(1, 10):
        settings["bn_batches"] = bn_batches() if recalibrated else None
        result, cell = pruned(model, tenths / 10, 16, masks=masks, **settings)
        masks = result.masks
        row.append({"accuracy": accuracy_on_test(model, images)} | cell)
        print(f"  {update} {tenths}0 %: {row[-1]['accuracy']:.2f} (paper {PAPER[update][tenths - 1]})", flush=True)
    return {"accuracy": [cell["accuracy"] for cell in row], "paper": PAPER[update], "steps": row}


METHODS: dict[str, dict[str, Any]] = {
    "magnitude, global": {"method": "magnitude"},
    "magnitude, per layer": {"method": "magnitude", "scope": "layer"},
    "mfac": {"method": "mfac"},
    "diagonal Fisher": {"method": "diagonal"},
    "kfac": {"method": "kfac"},
    "lobs, per layer": {"method": "lobs", "scope": "layer"},
    "wanda, per layer": {"method": "wanda", "scope": "layer"},
    "woodfisher (its own update)": {"method": "woodfisher", "update": "obs"},
}


def methods(only: str | None, images: int) -> None:
    """50, 70, 80 and 90 % one after the other, three recomputations each, 32 batches of 16 images for each of them."""
    for name in METHODS if only is None else [only]:
        if only is None:
            command = [sys.executable, "-m", "experiments.one_shot_pruning", "methods", "--only", name]
            subprocess.run([*command, "--test-images", str(images)], check=True)
        else:
            ledger = Ledger("one_shot_methods", f"{COMMAND} methods --test-images {images}")
            ledger.cell(name, lambda name=name: _method_row(METHODS[name], images))


def _method_row(settings: dict[str, Any], images: int) -> dict[str, Any]:
    model, masks, row = mfac_resnet20(), None, {}
    shared = {"num_grads": 32, "recomputations": 3, "loss_batches": 1}
    for sparsity in (0.5, 0.7, 0.8, 0.9):
        result, cell = pruned(model, sparsity, 16, masks=masks, **shared, **settings)
        masks = result.masks
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        cell |= {"accuracy": accuracy_on_test(model, images), "peak_mib": memory}
        row[f"{sparsity:.0%}"] = cell
        print(f"  {sparsity:.0%}: {cell['accuracy']:.2f} {cell['seconds']} s {memory} MiB", flush=True)
    return row


def two_four() -> None:
    """2:4 in every layer but the first, whose 3 inputs no group of 4 fits; every group is counted."""
    ledger = Ledger("one_shot_two_four", f"{COMMAND} two_four")
    for method in ("magnitude", "mfac"):
        ledger.cell(f"ResNet20, {method}", lambda method=method: _two_four_resnet(method))
    for method in ("magnitude", "mfac"):
        ledger.cell(f"MiniLM on STS-B, {method}", lambda method=method: _two_four_bert(method))


def _two_four_resnet(method: str) -> dict[str, Any]:
    model = mfac_resnet20()
    settings = {"pattern": "2:4", "ignore": ["conv1.weight"], "num_grads": 64, "recomputations": 8}
    result, cell = pruned(model, None, 16, method=method, **settings)
    return {"accuracy": accuracy_on_test(model), "groups": _count_groups(model, result)} | cell


def _count_groups(model: nn.Module, result: PruningResult) -> dict[int, int]:
    """{nonzero weights: number of groups of four}."""
    weights = dict(model.named_parameters())
    kept = [weights[name].movedim(1, -1).reshape(-1, 4).count_nonzero(1) for name in result.targets]
    return {int(k): int(n) for k, n in zip(*torch.cat(kept).unique(return_counts=True), strict=True)}


def _two_four_bert(method: str) -> dict[str, Any]:
    """All 18 matrices of the encoder; the loss is the squared error of the cosine on STS-B, 500 pairs for testing."""
    model = glue_stsb.model().requires_grad_(True)
    dev, train = glue_stsb.pairs("dev", 50, length=32, limit=500), glue_stsb.pairs("train", 8, length=32)
    dense = glue_stsb.correlation(model, dev)
    start = time.process_time()
    result = prune(
        model, glue_stsb.loss, train, None, pattern="2:4", targets=r"re:encoder\.layer.*weight$",
        ignore="re:LayerNorm", num_grads=32, recomputations=2, method=method, seed=1, progress=False,
    )  # fmt: skip
    seconds = time.process_time() - start
    return {
        "spearman_dense": dense, "spearman": glue_stsb.correlation(model, dev), "groups": _count_groups(model, result),
        "sparsity": result.sparsity, "weights": result.num_weights, "seconds": round(seconds, 1),
    }  # fmt: skip


SMALL: dict[str, Any] = {"batch_size": 16, "num_grads": 64, "recomputations": 8}
ABLATION: dict[str, dict[str, Any]] = {
    "64 gradients of 16, 8 recomputations, blocks of 128, damping 1e-5": {},
    "damping 1e-6": {"damping": 1e-6},
    "damping 1e-4": {"damping": 1e-4},
    "damping 1e-3": {"damping": 1e-3},
    "damping auto": {"damping": "auto"},
    "16 gradients": {"num_grads": 16},
    "256 gradients": {"num_grads": 256},
    "256 gradients of 4": {"num_grads": 256, "batch_size": 4},
    "blocks of 16": {"block_size": 16},
    "blocks of 1024": {"block_size": 1024},
    "full matrix": {"block_size": None},
    "2 recomputations": {"recomputations": 2},
    "16 recomputations": {"recomputations": 16},
    "update obs": {"update": "obs"},
    "update none": {"update": "none"},
    "augmented images": {"augment": True},
    "labels drawn": {"fisher": "sampled"},
    "per layer": {"scope": "layer"},
    "statistics re-estimated": {"recalibrated": True},
}  # fmt: skip


def ablation() -> None:
    ledger = Ledger("one_shot_ablation", f"{COMMAND} ablation")
    for name, change in ABLATION.items():
        settings = SMALL | {"loss_batches": 16, "images": 2500} | change
        if settings.pop("recalibrated", False):
            settings["bn_batches"] = bn_batches()
        ledger.cell(name, lambda settings=settings: measured(0.9, **settings))


def plot() -> None:
    words = {"x": "sparsity, %", "y": "accuracy on the test images, %"}
    dense = Ledger("one_shot_defaults", "").cells["dense"]["accuracy"]
    methods = {key: _curve(row.values()) for key, row in Ledger("one_shot_methods", "").cells.items()}
    title = "ResNet20 on CIFAR-10, 32 batches per step, no training afterwards"
    print(drawing.lines(IMAGES / "one_shot_methods.png", _over(dense, methods), title=title, **words))
    reached = {f"best: {key}": _curve(row.values()) for key, row in Ledger("one_shot_best", "").cells.items()}
    cells = Ledger("one_shot_defaults", "").cells
    reached["mfac.prune, defaults"] = _curve(cell for cell in cells.values() if "sparsity" in cell)
    for key, row in Ledger("one_shot_updates", "").cells.items():
        if key.startswith("joint, 1024"):
            reached["full matrix, 1,024 gradients, joint"] = _curve(row["steps"])
    title = "ResNet20 on CIFAR-10, the best results without training"
    print(drawing.lines(IMAGES / "one_shot_best.png", _over(dense, reached), title=title, **words))


def _curve(cells: Iterable[dict[str, Any]]) -> drawing.Curve:
    return drawing.curve((100 * cell["sparsity"], cell["accuracy"]) for cell in cells)


def _over(dense: float, curves: dict[str, drawing.Curve]) -> dict[str, drawing.Curve]:
    ends = [x for xs, _ in curves.values() for x in xs]
    return {f"dense, {dense:.2f}": ([min(ends), max(ends)], [dense, dense]), **curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=["defaults", "best", "updates", "methods", "two_four", "recalibration",
                                           "ablation", "plot"])  # fmt: skip
    parser.add_argument("--num-grads", type=int, default=1024, help="of updates; the paper has 1024")
    parser.add_argument("--test-images", type=int, default=10_000, help="of updates and methods; 10,000 are all")
    parser.add_argument("--only", help="one row of best, updates or methods, in this process")
    given = parser.parse_args()
    arguments = {"best": (given.only,), "updates": (given.num_grads, given.test_images, given.only),
                 "methods": (given.only, given.test_images)}  # fmt: skip
    globals()[given.recipe](*arguments.get(given.recipe, ()))


if __name__ == "__main__":
    main()

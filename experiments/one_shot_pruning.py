"""One-shot pruning of ResNet20 on CIFAR-10 in the paper's way, without any fine-tuning.

    python -m experiments.one_shot_pruning updates        # none, obs and joint on the full matrix, steps of 10 %
    python -m experiments.one_shot_pruning two_four       # 2:4 on ResNet20 and on a small BERT

`experiments.pruning_comparison` compares methods. Every cell is saved with its settings as soon as it is done; an
interrupted command resumes. Seconds are processor time of one thread, without evaluation.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import data
from experiments.baselines.pruning import prune
from experiments.ledger import RESULTS, Ledger
from experiments.models.resnet import mfac_resnet20
from experiments.tasks import glue_stsb
from experiments.training import cross_entropy
from mfac.pruning import PruningResult

COMMAND = "python -m experiments.one_shot_pruning"
PAPER = {  # Table 6 of the paper: accuracy at 10, 20, ..., 90 %
    "none": (91.4, 91.3, 91.0, 90.2, 88.4, 84.8, 77.2, 50.4, 11.5),
    "obs": (91.4, 91.4, 91.5, 91.2, 90.8, 89.7, 86.8, 75.6, 28.2),
    "joint": (91.5, 91.4, 91.4, 91.2, 90.7, 89.7, 87.5, 75.7, 28.1),
}


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


def accuracy_on_test(model: nn.Module, images: int = 10_000) -> float:
    return data.make_test(data.HALVES, images)(model)["accuracy"]


def pruned(
    model: nn.Module, sparsity: float | None, batch_size: int, augment: bool = False, **settings: Any
) -> tuple[PruningResult, dict[str, Any]]:
    """Prunes the model; the result, and the cell without accuracy."""
    start = time.process_time()
    # Later stages of a run must not see the same images again.
    seed = 0 if sparsity is None or settings.get("masks") is None else round(100 * sparsity)
    batches = data.cifar_batches(batch_size, data.HALVES, seed, augment)
    result = prune(model, cross_entropy, batches, sparsity, seed=1, progress=False, **settings)
    seconds = time.process_time() - start
    told = {key: value for key, value in settings.items() if key not in ("masks", "bn_batches")}
    recalibrated = settings.get("bn_batches") is not None
    wall = sum(record.seconds for record in result.history)
    beyond = wall - sum(record.gradient_seconds for record in result.history)
    return result, {
        "settings": {"batch_size": batch_size, "augment": augment, "recalibrated": recalibrated, **told},
        "sparsity": result.sparsity,
        "seconds": round(seconds, 1),
        "share_beyond_gradients": round(beyond / wall, 4) if wall else 0.0,
        "loss": [result.history[0].loss_before, result.history[-1].loss_after],
        "predicted_increase": result.predicted_increase,
        "damping": result.damping,
    }


def bn_batches(augment: bool = True) -> data.ImageBatches:
    """2,000 images for batch-norm statistics, augmented as in training."""
    images, labels = (part[:2000] for part in data.cifar10("train"))
    return data.ImageBatches(images, labels, 100, data.HALVES, seed=5, augment=augment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=["updates", "two_four"])
    parser.add_argument("--num-grads", type=int, default=1024, help="of updates; the paper has 1024")
    parser.add_argument("--test-images", type=int, default=10_000, help="of updates; 10,000 are all")
    parser.add_argument("--only", help="one row of updates")
    given = parser.parse_args()
    if given.recipe == "updates":
        updates(given.num_grads, given.test_images, given.only)
    else:
        two_four()


if __name__ == "__main__":
    main()

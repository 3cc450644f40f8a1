"""Batch-norm statistics of a pruned ResNet20: left, re-estimated at the end, and after every step."""

from typing import Any

import torch
from torch import nn

from experiments.data import HALVES, ImageBatches, cifar10
from experiments.ledger import Ledger
from experiments.models.resnet import mfac_resnet20
from experiments.pruned_resnet import accuracy_on_test, bn_batches, pruned
from experiments.training import cross_entropy
from mfac.pruning.batch_norm import recalibrate

SETTINGS = {"num_grads": 32, "recomputations": 6}


def recalibration() -> None:
    ledger = Ledger("one_shot_recalibration", "python -m experiments.one_shot_pruning recalibration")
    ledger.cell("dense", lambda: _state_of(mfac_resnet20()))
    for augment in (True, False):
        ledger.cell(f"dense, statistics anew, augmented: {augment}", lambda augment=augment: _dense_anew(augment))
    for sparsity in (0.7, 0.9):
        ledger.cell(f"{sparsity:.0%}, left or at the end", lambda s=sparsity: _pruned(s, False))
        ledger.cell(f"{sparsity:.0%}, after every step", lambda s=sparsity: _pruned(s, True))


def _state_of(model: nn.Module) -> dict[str, Any]:
    """On 2,500 test images and 1,000 training images, and the statistics themselves."""
    return {
        "accuracy": accuracy_on_test(model, 2500), "train_loss": _train_loss(model), "variances": _variances(model)
    }  # fmt: skip


def _dense_anew(augment: bool) -> dict[str, Any]:
    model = mfac_resnet20()
    recalibrate(model, bn_batches(augment))
    return _state_of(model)


def _pruned(sparsity: float, by_step: bool) -> dict[str, Any]:
    model = mfac_resnet20()
    _, cell = pruned(model, sparsity, 16, bn_batches=bn_batches() if by_step else None, **SETTINGS)
    state = _state_of(model)
    if by_step:
        return state | cell
    recalibrate(model, bn_batches())
    return {"left": state, "at the end": _state_of(model)} | cell


def _train_loss(model: nn.Module) -> float:
    """On 1,000 training images that the statistics were not taken from."""
    images, labels = cifar10("train")
    batches = ImageBatches(images[-1000:], labels[-1000:], 100, HALVES)
    with torch.no_grad():
        return sum(float(cross_entropy(model, batch)) for batch in batches) / len(batches)


def _variances(model: nn.Module) -> dict[str, float]:
    """The mean running variance of the second batch norm of every block, by stage."""
    found: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if name.endswith("bn2"):
            found.setdefault(name.split(".")[0], []).append(float(module.running_var.mean()))
    return {stage: sum(values) / len(values) for stage, values in found.items()}

"""ResNet20 on CIFAR-10, pruned in one shot and tested: what every recipe of one-shot pruning measures."""

import time
from typing import Any

from torch import nn

from experiments import data
from experiments.baselines.pruning import prune
from experiments.models.resnet import mfac_resnet20
from experiments.training import cross_entropy
from mfac.pruning import PruningResult


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


def measured(
    sparsity: float, batch_size: int, augment: bool = False, images: int = 10_000, **settings: Any
) -> dict[str, Any]:
    model = mfac_resnet20()
    _, cell = pruned(model, sparsity, batch_size, augment, **settings)
    return {"accuracy": accuracy_on_test(model, images), "test_images": images} | cell


def bn_batches(augment: bool = True) -> data.ImageBatches:
    """2,000 images for batch-norm statistics, augmented as in training."""
    images, labels = (part[:2000] for part in data.cifar10("train"))
    return data.ImageBatches(images, labels, 100, data.HALVES, seed=5, augment=augment)

"""ResNet20 on CIFAR-10, pruned in one go and tested: what every recipe of one-shot pruning measures."""

import time
from typing import Any

from torch import nn

import mfac
from experiments.baselines.pruning import prune
from experiments.data import HALVES, ImageBatches, accuracy, load_cifar10
from experiments.models.resnet import mfac_resnet20
from mfac.pruning import PruningResult

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


def train_batches(batch_size: int, augment: bool = False, seed: int = 0, images: int | None = None) -> ImageBatches:
    """Training images, shuffled; the first `images` of a fixed order where that is given."""
    pixels, labels = load_cifar10("train")
    return ImageBatches(pixels[:images], labels[:images], batch_size, HALVES, seed=seed, augment=augment)


def accuracy_on_test(model: nn.Module, images: int = 10_000) -> float:
    """Per cent of the first test images, as a rule of all of them."""
    pixels, labels = load_cifar10("test")
    return accuracy(model, ImageBatches(pixels[:images], labels[:images], 100, HALVES))


def pruned(
    model: nn.Module, sparsity: float | None, batch_size: int, augment: bool = False, **settings: Any
) -> tuple[PruningResult, dict[str, Any]]:
    """Prunes the model; the result, and the cell without accuracy."""
    start = time.process_time()
    # Stages of one run must not see the same images again.
    seed = 0 if sparsity is None or settings.get("masks") is None else round(100 * sparsity)
    batches = train_batches(batch_size, augment, seed)
    result = prune(model, LOSS, batches, sparsity, seed=1, progress=False, **settings)
    seconds = time.process_time() - start
    told = {key: value for key, value in settings.items() if key not in ("masks", "bn_batches")}
    wall = sum(record.seconds for record in result.history)
    beyond = wall - sum(record.gradient_seconds for record in result.history)
    return result, {
        "settings": {
            "batch_size": batch_size,
            "augment": augment,
            "recalibrated": settings.get("bn_batches") is not None,
            **told,
        },
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
    """One cell: prune a fresh checkpoint and test it."""
    model = mfac_resnet20()
    _, cell = pruned(model, sparsity, batch_size, augment, **settings)
    return {"accuracy": accuracy_on_test(model, images), "test_images": images} | cell


def bn_batches(augment: bool = True) -> ImageBatches:
    """Images for batch-norm statistics: augmented, as in training."""
    return train_batches(100, augment=augment, seed=5, images=2000)

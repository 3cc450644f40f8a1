"""ImageNet and models trained on it, for the full size of recipes."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from experiments.image_folder import FolderBatches
from experiments.models.mobilenet import MobileNetV1
from experiments.models.normalizer_free import nf_resnet50
from experiments.models.resnet50 import ResNet50
from experiments.recipe import Request

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet": MobileNetV1,
    "resnet50": ResNet50,
    "nf_resnet50": nf_resnet50,
}
TOP = (1, 5)


def load_weights(path: Path, model: nn.Module | None = None) -> nn.Module:
    """A trained model: `path` holds {"model": a name, "state_dict": ...}, or a bare state dict for `model`.

    Raises:
        ValueError: it does not say which model it is of, or does not fit.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if model is None:
        name = saved.get("model") if isinstance(saved, dict) else None
        if name not in MODELS:
            raise ValueError(
                f"{path} must hold {{'model': one of {', '.join(MODELS)}, 'state_dict': ...}}, not {name!r}"
            )
        model = MODELS[name]()
    state = {key.removeprefix("module."): value for key, value in saved.get("state_dict", saved).items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} is not of {type(model).__name__}: {error}") from None
    return model.eval()


def folder_batches(request: Request, split: str, batch_size: int, seed: int | None = None) -> FolderBatches:
    """Batches of `train` (with a seed) or of `val`."""
    size = 224 if request.size == "full" else 32
    return FolderBatches(request.image_folder(split), batch_size, size=size, seed=seed, workers=8 if size == 224 else 0)


@torch.no_grad()
def accuracies(model: nn.Module, batches: FolderBatches) -> dict[str, float]:
    """Per cent of the images whose class is the first, or among the first five."""
    right, total = dict.fromkeys(TOP, 0), 0
    training = model.training
    model.eval()
    for images, labels in batches:
        scores = model(images)
        places = scores.topk(min(max(TOP), scores.shape[1]), 1).indices == labels[:, None]
        for k in TOP:
            right[k] += int(places[:, :k].any(1).sum())
        total += len(labels)
    model.train(training)
    return {"accuracy": 100 * right[1] / total, "top5": 100 * right[5] / total}


def tester(request: Request) -> Callable[[nn.Module], dict[str, float]]:
    """model -> accuracies on `val`."""
    batches = folder_batches(request, "val", 256)
    return lambda model: accuracies(model, batches)

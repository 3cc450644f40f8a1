"""What the pruning recipes work on: ResNet20 on CIFAR-10, or a model on ImageNet; in smoke tests a fresh ResNet8."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments import data
from experiments.datasets.image_folder import FolderBatches
from experiments.models.mobilenet import MobileNetV1
from experiments.models.normalizer_free import nf_resnet50
from experiments.models.resnet import ResNet, mfac_resnet20
from experiments.models.resnet50 import ResNet50
from experiments.recipe import Request

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet": MobileNetV1,
    "resnet50": ResNet50,
    "nf_resnet50": nf_resnet50,
}
TOP = (1, 5)


class ImageTask(NamedTuple):
    """How to make a trained model, its training batches of (size, seed), and its test."""

    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Any]
    test: Callable[[nn.Module], dict[str, float]]


def image_task(request: Request, test_images: int, augment: bool = True, name: str | None = None) -> ImageTask:
    """ImageNet at full size or where its folder is given; `name`: of the model of a bare state dict."""
    if request.size == "full" or request.images is not None:
        return imagenet_task(request, lambda: load_weights(request.weights(), name))
    return ImageTask(
        untrained_resnet8 if request.size == "smoke" else mfac_resnet20,
        lambda size, seed: data.cifar_batches(size, data.HALVES, seed, augment),
        data.make_test(data.HALVES, test_images),
    )


def imagenet_task(request: Request, model: Callable[[], nn.Module]) -> ImageTask:
    held_out = folder_batches(request, "val", 256)
    return ImageTask(
        model,
        lambda size, seed: folder_batches(request, "train", size, seed),
        lambda model: accuracies(model, held_out),
    )


def untrained_resnet8() -> ResNet:
    """78,000 weights, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResNet(8).to(memory_format=torch.channels_last).eval()


def load_weights(path: Path, name: str | None = None) -> nn.Module:
    """A trained model: `path` holds {"model": a name, "state_dict": ...}, or a state dict of the model `name`."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    name = name or (saved.get("model") if isinstance(saved, dict) else None)
    if name not in MODELS:
        raise ValueError(f"{path} must hold {{'model': one of {', '.join(MODELS)}, 'state_dict': ...}}, not {name!r}")
    model = MODELS[name]()
    state = {key.removeprefix("module."): value for key, value in saved.get("state_dict", saved).items()}
    model.load_state_dict(state)
    return model.eval()


def folder_batches(request: Request, split: str, batch_size: int, seed: int | None = None) -> FolderBatches:
    size = 224 if request.size == "full" else 32
    return FolderBatches(request.image_folder(split), batch_size, size=size, seed=seed, workers=8 if size == 224 else 0)


@torch.no_grad()
def accuracies(model: nn.Module, batches: FolderBatches) -> dict[str, float]:
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

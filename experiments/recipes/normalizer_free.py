"""Figure of the appendix: a ResNet with and without batch norm, pruned in one step by magnitude and by M-FAC.

M-FAC has a row for each update of the weights that stay: joint (the default, also with a hundred times the damping),
obs (the paper's), and none, which shows what the choice of weights does by itself. `moved` is how far these weights
went, as a share of their length.

Small: ResNet20 and a normalizer-free ResNet20 (272,474 weights each) are trained for 600 steps on CIFAR-10 with the
same settings, and pruned: 13 minutes on one core. Gradients are clipped, without which the second diverges. Full:
ResNet50 and NF-ResNet50 on ImageNet, 1,000 gradients, blocks of 10,000: --images FOLDER --checkpoint FOLDER with
resnet50.pt and nf_resnet50.pt (state dicts).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfac
from experiments import data, drawing
from experiments.cifar_images import cifar10
from experiments.imagenet import MODELS, folder_batches, load_weights, tester
from experiments.models.normalizer_free import nf_resnet
from experiments.models.resnet import ResNet
from experiments.recipe import Recipe, Request, Results
from experiments.training import Training, cosine, last_loss

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())
RUNS = data.data_folder().parent / "runs"
DIVERGED = 10.0  # a loss that no network has which knows nothing
METHODS: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude"},
    "mfac": {"update": "joint"},
    "mfac, damping 1e-3": {"update": "joint", "damping": 1e-3},
    "mfac, obs": {"update": "obs"},
    "mfac, no update": {"update": "none"},
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {"ResNet20": lambda: ResNet(20), "NF-ResNet20": nf_resnet}


@dataclass(frozen=True)
class Settings:
    """How much is trained and pruned."""

    sparsities: tuple[float, ...]
    arguments: tuple[tuple[str, int], ...]
    steps: int = 600
    batch_size: int = 128
    test_images: int = 5000


SIZES = {
    "full": Settings((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (("num_grads", 1000), ("block_size", 10_000))),
    "small": Settings((0.3, 0.5, 0.6, 0.7, 0.8), (("num_grads", 64), ("block_size", 128))),
    "smoke": Settings((0.5,), (("num_grads", 2), ("block_size", 8)), steps=2, batch_size=8, test_images=100),
}


def run(request: Request) -> None:
    results, settings = Results("normalizer_free", request), SIZES[request.size]
    results.settings(**vars(settings))
    for network, make_model, batches, test in tasks(request, settings):
        wanted = [m for m in METHODS if request.wants(f"{network}, {m}")]
        if all(f"{network}, {method}" in results.cells for method in wanted):
            continue
        model = make_model()
        results.cell(f"{network}, dense", lambda model=model, test=test: test(model))
        state = model.state_dict()
        for method in wanted:
            results.cell(f"{network}, {method}", lambda a=(model, state, batches, test, method): row(*a, settings))


def row(
    model: nn.Module, state: dict[str, torch.Tensor], batches: Callable[[], Any], test: Any, method: str,
    settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    """One method at every sparsity, each from the dense network."""
    state = {key: value.clone() for key, value in state.items()}
    found = {}
    for sparsity in settings.sparsities:
        model.load_state_dict(state)
        pruned = mfac.prune(model, LOSS, batches(), sparsity, recomputations=1, seed=1, loss_batches=1,
                            progress=False, **METHODS[method], **dict(settings.arguments))  # fmt: skip
        found[f"{sparsity:g}"] = test(model) | {"moved": moved(model, state, pruned.masks)}
    model.load_state_dict(state)
    print(f"  {method}: {found}", flush=True)
    return {"points": found}


def moved(model: nn.Module, before: dict[str, torch.Tensor], masks: dict[str, torch.Tensor]) -> float:
    """How far the weights that stay have gone, as a share of their length."""
    weights = dict(model.named_parameters())
    way = sum(float((weights[name].detach() - before[name])[kept].square().sum()) for name, kept in masks.items())
    length = sum(float(before[name][kept].square().sum()) for name, kept in masks.items())
    return round(math.sqrt(way / length), 4)


def tasks(request: Request, settings: Settings) -> Any:
    """(name, make a trained model, batches of 16, test) of both networks."""
    if request.size == "full":
        for name in ("resnet50", "nf_resnet50"):
            path = request.weights() / f"{name}.pt"
            yield (name, lambda a=(path, name): load_weights(a[0], MODELS[a[1]]()),
                   lambda: folder_batches(request, "train", 16, 0), tester(request))  # fmt: skip
        return
    train = cifar10("train")
    images, labels = (part[: settings.test_images] for part in cifar10("test"))
    held_out = data.ImageBatches(images, labels, 250, data.CIFAR10)
    for name, build in NETWORKS.items():
        yield (name, lambda a=(name, build): trained(*a, train, request, settings),
               lambda: data.ImageBatches(*train, 16, data.CIFAR10, seed=0),
               lambda model: {"accuracy": data.accuracy(model, held_out)})  # fmt: skip


def trained(name: str, build: Callable[[], nn.Module], train: Any, request: Request, settings: Settings) -> nn.Module:
    """A network after a short training, kept for the next time."""
    torch.manual_seed(1)
    model = build().to(memory_format=torch.channels_last)
    path = (request.folder if request.size == "smoke" else RUNS) / f"normalizer_free_{name}_{settings.steps}_clipped.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    batches = data.ImageBatches(*train, settings.batch_size, data.CIFAR10, seed=1, augment=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    record = Training(model, optimizer, batches, settings.steps, cosine).run()
    print(f"  {name} trained: loss {record['losses'][-1]}", flush=True)
    if not last_loss(record) < DIVERGED:
        raise RuntimeError(f"{name} has diverged in training: there is nothing to prune")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()


def clip(model: nn.Module) -> None:
    """Gradients of norm 1 at most."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def plot(request: Request) -> Path:
    """A panel for each network."""
    results = Results("normalizer_free", request)
    dense = {key.split(", ")[0]: cell["accuracy"] for key, cell in results.cells.items() if "points" not in cell}
    figure, (panels,) = drawing.pyplot().subplots(
        1, max(1, len(dense)), figsize=(13, 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (network, accuracy) in zip(panels, dense.items(), strict=False):
        for number, method in enumerate(METHODS):
            points = results.cells.get(f"{network}, {method}", {"points": {}})["points"]
            xs, ys = [100 * float(s) for s in points], [point["accuracy"] / accuracy for point in points.values()]
            axis.plot(xs, ys, label=method, markersize=5, **drawing.style(number))
            print(f"{network}, {method}: " + ", ".join(f"{x:g} % {y:.3f}" for x, y in zip(xs, ys, strict=True)))
        axis.set(title=f"{network}, dense {accuracy:.1f} %", xlabel="sparsity, %")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy as a share of the dense model's")
    panels[0].legend()
    figure.suptitle("With and without batch norm, pruned in one step")
    return drawing.save(figure, results.picture())


RECIPE = Recipe("normalizer_free", "normalizer-free against batch norm, one-shot (figure)", run, plot, minutes=7)

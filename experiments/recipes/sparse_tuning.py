"""Table 4, right, last rows: fine-tuning a sparse model, SGD against M-FAC with masks; overhead of a step.

A ResNet20 pruned to 90 % (MobileNetV1 and ResNet50 at full size) is tuned by both with the same hyper-parameters, as in
the paper: learning rate 0.005, a tenth of it after each third, batches of 256. M-FAC's window of 512 gradients holds
the kept weights alone. Overheads are measured in one run, the optimizers taking turns, with a full window.

M-FAC's learning rate is in the paper's units, in which a step grows with m.

Small: 100 steps each: 8 minutes on one core. Full: 30 passes over ImageNet from the last step of a gradual run:
--images FOLDER --checkpoint FILE with {"model": "resnet50" or "mobilenet", "state_dict": ...}, zero where it is pruned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mfac
from experiments import data, drawing
from experiments.cifar_images import cifar10, untrained_resnet8
from experiments.imagenet import folder_batches, load_weights, tester
from experiments.models.resnet import mfac_resnet20
from experiments.recipe import Recipe, Request, Results
from experiments.step_times import overheads, step_of, take_turns
from experiments.training import Training, drops
from mfac.pruning import attach_masks, masks_from_zeros

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())
RATE, WINDOW, DAMPING = 0.005, 512, 1e-5
RUNS = data.data_folder().parent / "runs"


@dataclass(frozen=True)
class Settings:
    """How much is pruned, trained and timed."""

    steps: int
    rounds: int
    sparsity: float = 0.9
    pruning: tuple[tuple[str, int], ...] = (("num_grads", 64), ("recomputations", 16))
    window: int = WINDOW
    batch_size: int = 256
    test_images: int = 10_000
    images: int | None = None


SIZES = {
    "full": Settings(steps=30 * 5004, rounds=20),
    "small": Settings(steps=100, rounds=12, test_images=5000),
    "smoke": Settings(steps=2, rounds=1, pruning=(("num_grads", 2), ("recomputations", 1)), window=4, batch_size=8,
                      test_images=100, images=64),
}  # fmt: skip


def run(request: Request) -> None:
    results, settings = Results("sparse_tuning", request), SIZES[request.size]
    results.settings(lr=RATE, damping=DAMPING, **vars(settings))
    make_model, batches, test = full_task(request) if request.size == "full" else small_task(request, settings)
    masks = masks_from_zeros(make_model())
    kept = sum(int(mask.sum()) for mask in masks.values())
    results.cell("before", lambda: {**test(make_model()), "kept": kept})
    for optimizer in ("SGD", "M-FAC"):
        if request.wants(optimizer):
            results.cell(optimizer, lambda o=optimizer: tuned(o, make_model(), masks, batches, test, settings))
    if request.wants("overhead"):
        results.cell("overhead", lambda: overhead(make_model, masks, batches, settings))


def make_optimizer(name: str, model: nn.Module, masks: dict[str, Tensor], window: int) -> torch.optim.Optimizer:
    """SGD with momentum, zeros kept by a hook; or M-FAC with the masks in its window."""
    if name == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
        attach_masks(optimizer, masks, model)
        return optimizer
    # In the units of the sum, so that a smaller window keeps the length of steps that 512 gradients have.
    return mfac.MFAC(model.named_parameters(), RATE * WINDOW, window, DAMPING * WINDOW, normalize="sum", masks=masks)


def tuned(
    name: str, model: nn.Module, masks: dict[str, Tensor], batches: Callable[[int], Any], test: Any, settings: Settings
) -> dict[str, Any]:
    optimizer = make_optimizer(name, model, masks, settings.window)
    keep = RUNS / f"sparse_tuning_{name}.pt" if settings.steps > 10**4 else None
    training = Training(model, optimizer, batches(1), settings.steps, drops(1 / 3, 2 / 3), test=test,
                        test_every=max(1, settings.steps // 5), keep=keep)  # fmt: skip
    record = training.run()
    named = dict(model.named_parameters())
    assert all(not named[key][~mask].count_nonzero() for key, mask in masks.items())
    return record


def overhead(
    make_model: Callable[[], nn.Module], masks: dict[str, Tensor], batches: Callable[[int], Any], settings: Settings
) -> dict[str, Any]:
    """Both take turns on the same batches."""
    few = [batch for batch, _ in zip(batches(2), range(settings.rounds + 1), strict=False)]
    steps = {}
    for name in ("SGD", "M-FAC"):
        model = make_model()
        steps[name] = step_of(model, make_optimizer(name, model, masks, settings.window), few)
    times = take_turns(steps, settings.rounds)
    return {"steps": overheads(times, "SGD"), "seconds": times, "target": 1.05, "paper": {"MBv1": 1.03, "RN50": 1.05}}


def small_task(request: Request, settings: Settings) -> tuple[Callable[[], nn.Module], Callable[[int], Any], Any]:
    """ResNet20 on CIFAR-10, pruned once and kept."""
    train = cifar10("train")
    dense = untrained_resnet8 if request.size == "smoke" else mfac_resnet20
    folder = request.folder if request.size == "smoke" else RUNS
    path = folder / f"resnet20_pruned_{settings.sparsity:g}_{'_'.join(f'{v}' for _, v in settings.pruning)}.pt"
    if not path.exists():
        model = dense()
        images = data.ImageBatches(*train, 32, data.HALVES, seed=0)
        mfac.prune(model, LOSS, images, settings.sparsity, seed=1, progress=False, **dict(settings.pruning))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)

    def make_model() -> nn.Module:
        model = dense()
        model.load_state_dict(torch.load(path, weights_only=True))
        return model

    def batches(seed: int) -> data.ImageBatches:
        images, labels = (part[: settings.images] for part in train)
        return data.ImageBatches(images, labels, settings.batch_size, data.HALVES, seed=seed, augment=True)

    images, labels = (part[: settings.test_images] for part in cifar10("test"))
    held_out = data.ImageBatches(images, labels, 250, data.HALVES)
    return make_model, batches, lambda model: {"accuracy": data.accuracy(model, held_out)}


def full_task(request: Request) -> tuple[Callable[[], nn.Module], Callable[[int], Any], Any]:
    """The pruned model of the checkpoint on ImageNet."""
    return (
        lambda: load_weights(request.weights()),
        lambda seed: folder_batches(request, "train", 256, seed),
        tester(request),
    )


def plot(request: Request) -> Path:
    results = Results("sparse_tuning", request)
    curves = {}
    for name in ("SGD", "M-FAC"):
        if name in results.cells:
            tests = [{"step": 0, "accuracy": results.cells["before"]["accuracy"]}, *results.cells[name]["tests"]]
            curves[name] = ([t["step"] for t in tests], [t["accuracy"] for t in tests])
            print(f"{name}: {[round(t['accuracy'], 2) for t in tests]}")
    told = ""
    if "overhead" in results.cells:
        found = results.cells["overhead"]["steps"]["M-FAC"]
        told = f"; a step of M-FAC takes {found['over_sgd']:.3f} of SGD's"
        print(found)
    return drawing.lines(
        results.picture(), curves, x="step", y="test accuracy, %", title=f"ResNet20 at 90 % sparsity, tuned{told}"
    )


RECIPE = Recipe("sparse_tuning", "fine-tuning of sparse models, overhead of masks (table 4, right)", run, plot, 8)

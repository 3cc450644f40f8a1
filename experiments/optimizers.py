"""Training with M-FAC against SGD with momentum, Adam and AdamW: loss and accuracy by step and by second.

    python -m experiments.optimizers digits     # an MLP on scikit-learn's digits, five seeds: a minute
    python -m experiments.optimizers cifar10    # ResNet20 on CIFAR-10, three epochs: over an hour on one core
    python -m experiments.optimizers windows    # one learning rate, windows from 16 to 1024
    python -m experiments.optimizers plot       # the pictures of what was measured

Each optimizer gets the same small search: four settings, a short run each, the lowest training loss counts. All runs
lower the learning rate to zero by a cosine. Seconds are processor time of one thread, without evaluation.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mfac
from experiments import data
from experiments.ledger import RESULTS, Ledger
from experiments.models.resnet import ResNet
from experiments.training import last_loss

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    """What is learned: model and batches by seed, a test, and how long."""

    model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]]
    accuracy: Callable[[nn.Module], float]
    steps: int
    search_steps: int
    seeds: int
    test_every: int


def contenders(num_grads: int, dampings: tuple[float, float], decay: float) -> dict[str, dict[str, Make]]:
    """{optimizer: {settings: its maker}}, four each; momentum and decay are those of the paper's ResNet20 table.

    M-FAC is in the units of normalize="sum": a damping of 512e-5 and a learning rate of 0.5 are the paper's at m = 512.
    """

    def ours(lr: float, damping: float) -> Make:
        return lambda params: mfac.MFAC(params, lr, num_grads, damping, weight_decay=decay, normalize="sum")

    def sgd(lr: float) -> Make:
        return lambda params: torch.optim.SGD(params, lr, momentum=0.9, weight_decay=1e-4)

    def adam(lr: float) -> Make:
        return lambda params: torch.optim.Adam(params, lr)

    def adamw(lr: float) -> Make:
        return lambda params: torch.optim.AdamW(params, lr, weight_decay=0.01)

    pairs = itertools.product((0.5, 1.0), dampings)
    return {
        "M-FAC": {f"lr {lr:g}, damping {damping:g}": ours(lr, damping) for lr, damping in pairs},
        "SGD, momentum": {f"lr {lr:g}": sgd(lr) for lr in (0.03, 0.1, 0.3, 1.0)},
        "Adam": {f"lr {lr:g}": adam(lr) for lr in (3e-4, 1e-3, 3e-3, 1e-2)},
        "AdamW": {f"lr {lr:g}": adamw(lr) for lr in (3e-4, 1e-3, 3e-3, 1e-2)},
    }


def digits() -> Task:
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]

    def batches(seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in train[torch.randperm(len(train), generator=generator)].split(32)[:-1]:
                yield images[chosen], labels[chosen]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return 100 * float((model(images[test]).argmax(1) == labels[test]).float().mean())

    return Task(model, batches, accuracy, steps=440, search_steps=220, seeds=5, test_every=44)


def cifar10() -> Task:
    images, labels = data.load_cifar10("train")
    test = data.ImageBatches(*data.load_cifar10("test"), 250, data.CIFAR10)

    def batches(seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        shuffled = data.ImageBatches(images, labels, 128, data.CIFAR10, seed=seed, augment=True)
        return itertools.chain.from_iterable(itertools.repeat(shuffled))

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ResNet(20, projection=False).to(memory_format=torch.channels_last)

    def accuracy(model: nn.Module) -> float:
        return data.accuracy(model, test)

    return Task(model, batches, accuracy, steps=1170, search_steps=100, seeds=1, test_every=130)


TASKS = {
    "digits": (digits, contenders(num_grads=256, dampings=(1e-2, 1e-1), decay=0.0)),
    "cifar10": (cifar10, contenders(num_grads=512, dampings=(512e-5, 512e-4), decay=3e-3)),
}


def train(task: Task, make: Make, steps: int, seed: int, tests: bool = True) -> dict[str, Any]:
    """Losses and seconds of every step, and accuracies of every `test_every`; stops where the loss is not finite."""
    model = task.model(seed)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + math.cos(math.pi * t / steps)) / 2)
    losses, clock, tested, spent = [], [], [], 0.0
    for t, (images, labels) in enumerate(itertools.islice(task.batches(seed), steps), 1):
        began = time.process_time()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if not math.isfinite(float(loss.detach())):
            break
        optimizer.step()
        schedule.step()
        spent += time.process_time() - began
        losses.append(round(loss.item(), 5))
        clock.append(round(spent, 4))
        if tests and (t % task.test_every == 0 or t == steps):
            tested.append([t, round(task.accuracy(model), 2)])
            print(f"  step {t} of {steps}: loss {losses[-1]:.3f}, accuracy {tested[-1][1]:.2f} %", flush=True)
    return {
        "seed": seed,
        "finished": len(losses) == steps,
        "losses": losses,
        "seconds": clock,
        "tests": tested,
    }


def compare(name: str) -> None:
    """The search and the runs of one task, for every contender."""
    build, entrants = TASKS[name]
    task = build()
    ledger = Ledger(f"optimizers_{name}", f"python -m experiments.optimizers {name}")
    for label, settings in entrants.items():
        for setting, make in settings.items():
            search = partial(train, task, make, task.search_steps, 0, tests=False)
            ledger.cell(f"search, {label}, {setting}", search)
        best = min(settings, key=lambda setting: last_loss(ledger.cells[f"search, {label}, {setting}"]))
        for seed in range(1, task.seeds + 1):
            run = ledger.cell(
                f"run, {label}, {best}, seed {seed}", partial(train, task, settings[best], task.steps, seed)
            )
            print(f"{label}: {best}, loss {last_loss(run):.4f}, {run['tests'][-1:]}, {run['seconds'][-1]:.0f} s")


def windows() -> None:
    """The same learning rate and damping for every m, in both units: the paper's mean over m, and the sum."""
    task = digits()
    ledger = Ledger("optimizers_windows", "python -m experiments.optimizers windows")
    for m in (16, 64, 256, 1024):
        for normalize, lr, damping in (("full", 1e-3, 1e-5), ("sum", 0.5, 1e-1)):
            make = partial(mfac.MFAC, lr=lr, num_grads=m, damping=damping, normalize=normalize)
            for seed in range(1, 4):
                run = ledger.cell(f"{normalize}, m {m}, seed {seed}", partial(train, task, make, task.steps, seed))
                print(f"{normalize}, m = {m}: loss {last_loss(run):.4f}, accuracy {run['tests'][-1:]}")


def plot() -> None:
    """docs/images/optimizers_*.png of what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from experiments.optimizer_plots import plot_task, plot_windows

    for name in TASKS:
        if (RESULTS / f"optimizers_{name}.json").exists():
            plot_task(name)
    if (RESULTS / "optimizers_windows.json").exists():
        plot_windows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TASKS, "windows", "plot"])
    what = parser.parse_args().what
    {"windows": windows, "plot": plot}.get(what, lambda: compare(what))()


if __name__ == "__main__":
    main()

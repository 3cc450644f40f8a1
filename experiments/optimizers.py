"""Training with M-FAC against SGD with momentum, Adam and AdamW: loss and accuracy by step and by second.

    python -m experiments.optimizers digits     # an MLP on scikit-learn's digits, five seeds: a minute
    python -m experiments.optimizers cifar10    # ResNet20 on CIFAR-10, three epochs: over an hour on one core
    python -m experiments.optimizers windows    # one learning rate, windows from 16 to 1024
    python -m experiments.optimizers plot       # the pictures of the results

Each optimizer gets the same small search: four settings, a short run each; the lowest training loss wins. All runs
lower the learning rate to zero by a cosine. Seconds are processor time of one thread, without evaluation.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mfac
from experiments import data, drawing
from experiments.ledger import IMAGES, Ledger
from experiments.models.resnet import ResNet
from experiments.training import Training, cosine, last_loss

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
TITLES = {
    "digits": "An MLP on scikit-learn's digits, mean of five seeds",
    "cifar10": "ResNet20 on CIFAR-10, three epochs of batches of 128",
}


@dataclass(frozen=True)
class Task:
    model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterable[tuple[Tensor, Tensor]]]
    test: Callable[[nn.Module], dict[str, float]]
    steps: int
    search_steps: int
    seeds: int
    test_every: int


def contenders(num_grads: int, dampings: tuple[float, float], decay: float) -> dict[str, dict[str, Make]]:
    """{optimizer: {settings: how to make it}}, four each; momentum and decay are those of the paper's ResNet20 table.

    With normalize="sum" a damping of 512e-5 and a learning rate of 0.5 are the paper's at m = 512.
    """
    rates = (3e-4, 1e-3, 3e-3, 1e-2)
    ours = partial(mfac.MFAC, num_grads=num_grads, weight_decay=decay, normalize="sum")
    sgd = partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4)
    adamw = partial(torch.optim.AdamW, weight_decay=0.01)
    return {
        "M-FAC": {f"lr {lr:g}, damping {damping:g}": partial(ours, lr=lr, damping=damping)
                  for lr, damping in itertools.product((0.5, 1.0), dampings)},
        "SGD, momentum": {f"lr {lr:g}": partial(sgd, lr=lr) for lr in (0.03, 0.1, 0.3, 1.0)},
        "Adam": {f"lr {lr:g}": partial(torch.optim.Adam, lr=lr) for lr in rates},
        "AdamW": {f"lr {lr:g}": partial(adamw, lr=lr) for lr in rates},
    }  # fmt: skip


def digits() -> Task:
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1437], order[1437:]

    def batches(seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in train[torch.randperm(len(train), generator=generator)].split(32)[:-1]:
                yield images[chosen], labels[chosen]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    @torch.no_grad()
    def test(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 100 * float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())}

    return Task(model, batches, test, steps=440, search_steps=220, seeds=5, test_every=44)


def cifar10() -> Task:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ResNet(20, projection=False).to(memory_format=torch.channels_last)

    return Task(model, lambda seed: data.cifar_batches(128, data.CIFAR10, seed), data.make_test(data.CIFAR10),
                steps=1170, search_steps=100, seeds=1, test_every=130)  # fmt: skip


TASKS = {
    "digits": (digits, contenders(num_grads=256, dampings=(1e-2, 1e-1), decay=0.0)),
    "cifar10": (cifar10, contenders(num_grads=512, dampings=(512e-5, 512e-4), decay=3e-3)),
}


def train(task: Task, make: Make, steps: int, seed: int, tests: bool = True) -> dict[str, Any]:
    model = task.model(seed)
    test = task.test if tests else None
    run = Training(model, make(model.parameters()), task.batches(seed), steps, cosine, test=test,
                   test_every=task.test_every)  # fmt: skip
    return {"seed": seed} | run.run()


def compare(name: str) -> None:
    build, entrants = TASKS[name]
    task = build()
    ledger = Ledger(f"optimizers_{name}", f"python -m experiments.optimizers {name}")
    for label, settings in entrants.items():
        for setting, make in settings.items():
            search = partial(train, task, make, task.search_steps, 0, tests=False)
            ledger.cell(f"search, {label}, {setting}", search)
        best = min(settings, key=lambda setting: last_loss(ledger.cells[f"search, {label}, {setting}"]))
        for seed in range(1, task.seeds + 1):
            key = f"run, {label}, {best}, seed {seed}"
            run = ledger.cell(key, partial(train, task, settings[best], task.steps, seed))
            print(f"{label}: {best}, loss {last_loss(run):.4f}, {run['tests'][-1:]}, {run['seconds'][-1]:.0f} s")


def windows() -> None:
    """The same learning rate and damping for every m, for both normalizations."""
    task = digits()
    ledger = Ledger("optimizers_windows", "python -m experiments.optimizers windows")
    for m in (16, 64, 256, 1024):
        for normalize, lr, damping in (("full", 1e-3, 1e-5), ("sum", 0.5, 1e-1)):
            make = partial(mfac.MFAC, lr=lr, num_grads=m, damping=damping, normalize=normalize)
            for seed in range(1, 4):
                run = ledger.cell(f"{normalize}, m {m}, seed {seed}", partial(train, task, make, task.steps, seed))
                print(f"{normalize}, m = {m}: loss {last_loss(run):.4f}, accuracy {run['tests'][-1:]}")


def accuracies(run: dict[str, Any]) -> drawing.Curve:
    """(steps, accuracies) of a run's tests; older results have pairs in place of dictionaries."""
    pairs = ((t["step"], t["accuracy"]) if isinstance(t, dict) else tuple(t) for t in run["tests"])
    return drawing.curve(pairs)


def mean(columns: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*columns, strict=True)]


def smooth(values: list[float], width: int) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def plot_task(name: str) -> None:
    """Three panels: loss by step, loss by second, accuracy by step."""
    cells = Ledger(f"optimizers_{name}", "").cells
    figure, ((by_step, by_second, tested),) = drawing.panels(1, 3, (13, 3.9))
    for number, label in enumerate(TASKS[name][1]):
        found = {key: run for key, run in cells.items() if key.startswith(f"run, {label}, ") and run["finished"]}
        if not found:
            continue
        setting = next(iter(found)).removeprefix(f"run, {label}, ").rsplit(", seed", 1)[0]
        runs, look = list(found.values()), drawing.style(number)
        losses = smooth(mean([run["losses"] for run in runs]), 20)
        every = max(1, len(losses) // 8)
        by_step.plot(losses, label=f"{label} ({setting})", markevery=every, **look)
        by_second.plot(mean([run["seconds"] for run in runs]), losses, markevery=every, **look)
        tested.plot(accuracies(runs[0])[0], mean([accuracies(run)[1] for run in runs]), **look)
    by_step.set(xlabel="step", ylabel="training loss, mean of 20 steps", yscale="log")
    by_second.set(xlabel="seconds of one core", ylabel="training loss", yscale="log")
    tested.set(xlabel="step", ylabel="test accuracy, %")
    figure.suptitle(TITLES[name])
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncol=4, fontsize=9, frameon=False)
    drawing.save(figure, IMAGES / f"optimizers_{name}.png")


def plot() -> None:
    """Every task; and the last loss against m, with one learning rate and one damping."""
    for name in TASKS:
        plot_task(name)
    cells = Ledger("optimizers_windows", "").cells
    points: dict[str, list[tuple[int, float]]] = {"full": [], "sum": []}
    for key, run in cells.items():
        if run["finished"]:
            normalize, m, _ = key.split(", ")
            points[normalize].append((int(m.removeprefix("m ")), sum(run["losses"][-44:]) / 44))
    figure, ((axis,),) = drawing.panels(size=(6, 4))
    for normalize, mark, told in (("full", "o", "lr 1e-3, damping 1e-5"), ("sum", "s", "lr 0.5, damping 0.1")):
        axis.plot(*drawing.curve(points[normalize]), mark, label=f'normalize="{normalize}", {told}')
    axis.set(xscale="log", yscale="log", xlabel="m, gradients in the window", ylabel="loss of the last 44 steps",
             title="One learning rate for every window: digits, three seeds")  # fmt: skip
    ticks = sorted({m for found in points.values() for m, _ in found})
    axis.set_xticks(ticks, map(str, ticks))
    figure.legend(loc="outside lower center", frameon=False)  # inside it would cover a point
    drawing.save(figure, IMAGES / "optimizers_windows.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TASKS, "windows", "plot"])
    what = parser.parse_args().what
    {"windows": windows, "plot": plot}.get(what, lambda: compare(what))()


if __name__ == "__main__":
    main()

"""Figures: accuracy by seconds for SGD, Adam and M-FAC.

Small: ResNet20 on CIFAR-10, the runs of `python -m experiments.optimizers cifar10` (over an hour on one core, a search
for every optimizer included; done before, this only draws). Full: WRN 40-2 on CIFAR-100, 50 passes, SGD with and
without momentum, Adam and M-FAC with the settings of table 4, right.
"""

from dataclasses import replace
from pathlib import Path

import torch

from experiments import data, drawing, optimizers
from experiments.cifar100 import load_cifar100
from experiments.contenders import Contender, plain_contenders
from experiments.ledger import Ledger
from experiments.models.wide_resnet import WideResNet
from experiments.recipe import Recipe, Request, Results, run_module
from experiments.training import Training, drops

SHOWN = ("SGD, momentum", "Adam", "M-FAC")


def run(request: Request) -> None:
    {"small": run_small, "full": run_full, "smoke": run_smoke}[request.size](request)


def run_small(request: Request) -> None:
    run_module("optimizers", "cifar10")


def run_smoke(request: Request) -> None:
    """The optimizers' own loop on a few digits."""
    task = replace(optimizers.digits(), steps=6, test_every=3)
    request.folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger("optimizers_cifar10", "", request.folder)
    for label, settings in optimizers.contenders(8, (1e-2, 1e-1), 0.0).items():
        setting, make = next(iter(settings.items()))
        ledger.cell(f"run, {label}, {setting}, seed 1", lambda make=make: optimizers.train(task, make, 6, 1))


def run_full(request: Request) -> None:
    results = Results("wall_clock", request)
    train, test = load_cifar100("train"), data.ImageBatches(*load_cifar100("test"), 250, data.CIFAR10)
    keep = data.data_root().parent / "runs"
    entrants = plain_contenders() | {"SGD without momentum": Contender("SGD", 0.1, batch_size=256)}
    for label, contender in entrants.items():
        if not request.wants(label):
            continue

        def whole(label: str = label, contender: Contender = contender) -> dict:
            torch.manual_seed(1)
            model = WideResNet(40, 2, 100)
            optimizer = contender.make(model)
            if label == "SGD without momentum":
                optimizer.param_groups[0]["momentum"] = 0.0
            batches = data.ImageBatches(*train, contender.batch_size, data.CIFAR10, seed=1, augment=True)
            steps = 50 * len(batches)
            return Training(model, optimizer, batches, steps, drops(0.5, 0.75), test_every=len(batches),
                            test=lambda model: {"accuracy": data.accuracy(model, test)},
                            keep=keep / f"wall_clock_{label}.pt", keep_every=5).run()  # fmt: skip

        results.cell(label, whole)


def plot(request: Request) -> Path:
    curves = {}
    if request.size == "full":
        for label, run in Results("wall_clock", request).cells.items():
            curves[label] = _points(run, [(t["step"], t["accuracy"]) for t in run["tests"]])
    else:
        for key, run in Ledger("optimizers_cifar10", "", request.folder).cells.items():
            label = next((label for label in SHOWN if key.startswith(f"run, {label}, ")), None)
            if label is not None and run["finished"]:
                curves[key.removeprefix("run, ").rsplit(", seed", 1)[0]] = _points(run, run["tests"])
    return drawing.lines(
        request.folder / f"wall_clock_{request.size}.png", curves, x="seconds of one core, tests not counted",
        y="test accuracy, %", title="Accuracy by time",
    )  # fmt: skip


def _points(run: dict, tests: list) -> tuple[list[float], list[float]]:
    points = [(run["seconds"][step - 1], value) for step, value in tests]
    return [second for second, _ in points], [value for _, value in points]


RECIPE = Recipe("wall_clock", "accuracy by seconds for SGD, Adam and M-FAC (figures)", run, plot, minutes=20)

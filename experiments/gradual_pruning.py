"""ResNet20 on CIFAR-10 gradually to 95 and 98 %, with fine-tuning in between: Fisher's masks against magnitude's.

    python -m experiments.gradual_pruning run     # a search and a run of ten epochs for each: 25 minutes on one core
    python -m experiments.gradual_pruning plot    # the picture and the table of the results

This is table 3, practical schedules. All have the same schedule, the paper's cycle of learning rates, momentum reset at
each step, and the same number of epochs. At 95 and at 98 % a copy is trained for two more. Each method has its own
search of the learning rate: one step to 80 % and half an epoch at each of three rates, on the first 45,000 training
images, by the accuracy on the others. "magnitude, longer" has the rate of `GradualPruner`'s default, and trains for as
many more mini-batches after each step as that takes for pruning. Training is in bfloat16 where that is faster.
"""

import argparse
import copy
import itertools
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import data, drawing
from experiments.baselines.pruning import PAPER
from experiments.image_task import untrained_resnet8
from experiments.ledger import IMAGES
from experiments.models.resnet import mfac_resnet20
from experiments.recipe import Recipe, Request, Results
from experiments.training import cross_entropy
from experiments.training_tasks import autocast_loss
from mfac.gradients.losses import LossFn
from mfac.pruning import GradualPruner, attach_masks, learning_rate_cycle

DEFAULT, LONGER = "mfac.GradualPruner", "magnitude, longer"
MAGNITUDE = {"method": "magnitude", "recomputations": 1, "recalibrate": False}
METHODS: dict[str, dict[str, Any]] = {
    DEFAULT: {"recomputations": 2},
    "M-FAC (paper)": PAPER | {"damping": "auto", "recomputations": 5, "recalibrate": "auto"},
    "magnitude": MAGNITUDE,
    LONGER: MAGNITUDE,
}


@dataclass(frozen=True)
class Settings:
    schedule: tuple[float, ...] = (0.8, 0.9, 0.95, 0.98)
    ends: tuple[float, ...] = (0.95, 0.98)
    rates: tuple[float, ...] = (0.005, 0.02, 0.05)  # the first is the paper's
    batch_size: int = 128
    period: int = 585  # mini-batches between steps
    longer: int = 150  # what two recomputations of the default take, in mini-batches
    search_period: int = 195
    tail: int = 780
    gradient_batch: int = 16
    gradient_batches: int = 64
    test_images: int = 10_000
    held_out: int = 5000
    tiny: bool = False


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, source: Iterable[Any], count: int,
    loss_fn: LossFn = cross_entropy,
) -> float:  # fmt: skip
    """Trains on `count` batches; processor seconds."""
    began = time.process_time()
    model.train()
    for batch in itertools.islice(source, count):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    return time.process_time() - began


class Run:
    """One method on its way through the schedule; a search is without some training images, and is tested on them."""

    def __init__(self, name: str, settings: Settings, lr: float, search: bool = False):
        self.name, self.settings, self.lr = name, settings, lr
        period = settings.search_period if search else settings.period
        self.period = period + settings.longer * (name == LONGER)
        images = data.cifar10("train")
        self.images = [part[: -settings.held_out] for part in images] if search else images
        rest = [part[-settings.held_out :] for part in images]
        self.test = data.make_test(data.HALVES, settings.test_images, (lambda _: rest) if search else data.cifar10)
        self.model = untrained_resnet8() if settings.tiny else mfac_resnet20()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        steps = len(settings.schedule)
        self.scheduler = learning_rate_cycle(self.optimizer, self.period, steps, low=self.period // 3)
        self.pruner = GradualPruner(
            self.model, cross_entropy, self.calibration, list(settings.schedule), optimizer=self.optimizer,
            reset_momentum=True, progress=False, **METHODS[name],
        )  # fmt: skip

    def batches(self, size: int, seed: int) -> Any:
        return data.ImageBatches(*self.images, size, data.HALVES, seed=seed, augment=True)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int, seed: int) -> float:
        source = itertools.chain.from_iterable(itertools.repeat(self.batches(self.settings.batch_size, seed)))
        return round(train(model, optimizer, scheduler, source, count, autocast_loss), 1)

    def calibration(self, step: int) -> list[Any]:
        batches = self.batches(self.settings.gradient_batch, step)
        return list(itertools.islice(batches, self.settings.gradient_batches))

    def step(self) -> dict[str, float] | None:
        """Prunes to the next sparsity, trains and tests; None at the end."""
        began = time.process_time()
        result = self.pruner.step()
        if result is None:
            return None
        row = {"sparsity": result.sparsity, "pruning_seconds": round(time.process_time() - began, 1)}
        row["pruned"] = self.test(self.model)["accuracy"]
        number = self.pruner.steps_done
        row["training_seconds"] = self.train(self.model, self.optimizer, self.scheduler, self.period, 1000 + number)
        row["trained"] = self.test(self.model)["accuracy"]
        if self.settings.schedule[number - 1] in self.settings.ends:
            row["finished"] = self.finished(2000 + number)
        print(f"  {self.name}: {row}", flush=True)
        return row

    def finished(self, seed: int) -> float:
        """Test accuracy of a copy after the last training at this sparsity."""
        model, masks, tail = copy.deepcopy(self.model), self.pruner.masks, self.settings.tail
        optimizer = torch.optim.SGD(model.parameters(), self.lr, momentum=0.9)
        attach_masks(optimizer, masks, model)
        scheduler = learning_rate_cycle(optimizer, 1, 0, drops=(tail // 2, tail * 4 // 5))
        self.train(model, optimizer, scheduler, tail, seed)
        named = dict(model.named_parameters())
        assert all(not named[name][~mask].count_nonzero() for name, mask in masks.items())
        return self.test(model)["accuracy"]


def measure(results: Results, settings: Settings) -> None:
    for name in filter(results.wants, METHODS):
        searched, found = DEFAULT if name == LONGER else name, {}
        for lr in settings.rates:
            search = lambda s=searched, r=lr: Run(s, settings, r, search=True).step()  # noqa: E731
            found[lr] = results.cell(f"search, {searched}, lr {lr:g}", search)["trained"]
        best = max(found, key=found.__getitem__)
        run = lambda n=name, r=best: list(iter(Run(n, settings, r).step, None))  # noqa: E731
        results.cell(name, lambda r=best, steps=run: {"learning_rate": r, "steps": steps()})


def draw(results: Results, settings: Settings) -> Path:
    figure, ((axis,),) = drawing.panels()
    for number, name in enumerate(name for name in METHODS if name in results.cells):
        cell = results.cells[name]
        rows = cell["steps"]
        steps = [i + offset for i in range(len(rows)) for offset in (0, 0.7)]
        values = [row[key] for row in rows for key in ("pruned", "trained")]
        axis.plot(steps, values, label=f"{name}: after pruning, after training", **drawing.style(number))
        ends = drawing.curve((i + 0.7, row["finished"]) for i, row in enumerate(rows) if "finished" in row)
        spent = [round(sum(row[key] for row in rows)) for key in ("pruning_seconds", "training_seconds")]
        print(f"{name}: learning rate {cell['learning_rate']:g}, {ends[1]} %, pruning and training {spent} s")
        axis.plot(*ends, f"C{number}*", markersize=11, label=f"{name}: after the last training")
    axis.set_xticks(range(len(settings.schedule)), [f"{100 * sparsity:.1f} %" for sparsity in settings.schedule])
    axis.set(xlabel="sparsity", ylabel="test accuracy, %", title="ResNet20 on CIFAR-10, pruned gradually")
    axis.legend(fontsize=8)
    return drawing.save(figure, results.picture)


RECIPE = Recipe(
    "table3", "gradual pruning, practical schedules (table 3)", measure, draw, Settings(),
    Settings((0.5, 0.6), (0.6,), (0.005,), 8, 2, 1, 2, 5, 2, 2, 10, 20, tiny=True), 100, "gradual_resnet20",
    "python -m experiments.gradual_pruning run",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plot"])
    parser.add_argument("--only", choices=METHODS, default="", help="one of them, so that several can run in parallel")
    given = parser.parse_args()
    if given.what == "run":
        RECIPE.run(Request(only=given.only))
    else:
        shutil.copy(RECIPE.plot(Request()), IMAGES / "gradual.png")


if __name__ == "__main__":
    main()

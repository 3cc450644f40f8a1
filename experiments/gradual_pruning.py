"""ResNet20 on CIFAR-10 gradually to 95 and 98 %, with fine-tuning in between: M-FAC against magnitude at equal cost.

    python -m experiments.gradual_pruning run     # a search, then two runs of about 12 minutes on one core
    python -m experiments.gradual_pruning plot    # the picture and the table of the results

This is table 3, practical schedules. Both have the same schedule, the paper's cycle of learning rates, momentum reset
at each step, and the same cost in images: half an epoch per step. M-FAC spends 5,120 images of it on gradients, and the
cost of 7 mini-batches on batch-norm statistics; magnitude trains on all of it. At 95 and at 98 % a copy is trained for
60 more mini-batches. Each has its own search of the learning rate: one step to 80 % and 104 mini-batches (including the
cost of pruning) at each of three rates.
"""

import argparse
import copy
import itertools
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import data, drawing
from experiments.baselines.pruning import PAPER
from experiments.image_task import resnet20_task
from experiments.ledger import IMAGES
from experiments.recipe import Recipe, Request, Results
from experiments.training import cross_entropy
from mfac.pruning import GradualPruner, attach_masks, learning_rate_cycle

METHODS = ("M-FAC", "magnitude")


@dataclass(frozen=True)
class Settings:
    schedule: tuple[float, ...] = (0.8, 0.9, 0.95, 0.98)
    ends: tuple[float, ...] = (0.95, 0.98)
    rates: tuple[float, ...] = (0.005, 0.02, 0.05)  # the first is the paper's
    batch_size: int = 128
    period: int = 195
    search_period: int = 104
    tail: int = 60
    num_grads: int = 64
    recomputations: int = 5
    gradient_batch: int = 16
    test_images: int = 1000  # 10,000 at the ends
    tiny: bool = False

    def cost(self, method: str) -> int:
        """Of pruning, in mini-batches of training: gradients, and 4 batches for batch norm after each recomputation."""
        gradients = self.num_grads * self.recomputations * self.gradient_batch // self.batch_size
        return gradients + (0 if self.tiny else 7) if method == "M-FAC" else 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, source: Any, count: int) -> float:
    """Trains on `count` batches; processor seconds."""
    began = time.process_time()
    model.train()
    for batch in itertools.islice(source, count):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    return time.process_time() - began


class Run:
    """One method on its way through the schedule."""

    def __init__(self, name: str, settings: Settings, period: int, lr: float):
        self.name, self.settings, self.lr, self.period = name, settings, lr, period - settings.cost(name)
        self.task = resnet20_task(settings.test_images, tiny=settings.tiny)
        self.model = self.task.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        steps = len(settings.schedule)
        self.scheduler = learning_rate_cycle(self.optimizer, self.period, steps, low=self.period // 3)
        options = {"method": "magnitude", "num_grads": 1, "recomputations": 1, "bn_batches": None}
        if name == "M-FAC":
            bn_batches = list(itertools.islice(self.task.batches(settings.batch_size, 3000), 4))
            options = {"damping": "auto", "num_grads": settings.num_grads, "recomputations": settings.recomputations,
                       "bn_batches": bn_batches}  # fmt: skip
        self.pruner = GradualPruner(
            self.model, cross_entropy, lambda step: self.task.batches(settings.gradient_batch, step),
            list(settings.schedule), optimizer=self.optimizer, reset_momentum=True, progress=False, **PAPER | options,
        )  # fmt: skip

    def step(self) -> dict[str, float] | None:
        """Prunes to the next sparsity, trains and tests; None at the end."""
        began = time.process_time()
        result = self.pruner.step()
        if result is None:
            return None
        row = {"sparsity": result.sparsity, "pruning_seconds": round(time.process_time() - began, 1)}
        row["pruned"] = self.task.test(self.model)["accuracy"]
        number = self.pruner.steps_done
        source = self.task.batches(self.settings.batch_size, 1000 + number)
        row["training_seconds"] = round(train(self.model, self.optimizer, self.scheduler, source, self.period), 1)
        row["trained"] = self.task.test(self.model)["accuracy"]
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
        train(model, optimizer, scheduler, self.task.batches(self.settings.batch_size, seed), tail)
        named = dict(model.named_parameters())
        assert all(not named[name][~mask].count_nonzero() for name, mask in masks.items())
        return accuracy_at_end(model, self.settings)

    def whole(self) -> dict[str, Any]:
        return {"learning_rate": self.lr, "steps": list(iter(self.step, None))}


def accuracy_at_end(model: nn.Module, settings: Settings) -> float:
    return data.make_test(data.HALVES, 10 * settings.test_images)(model)["accuracy"]


def measure(results: Results, settings: Settings) -> None:
    results.cell("dense", lambda: accuracy_at_end(resnet20_task(1, tiny=settings.tiny).model(), settings))
    for name in filter(results.wants, METHODS):
        make = partial(Run, name, settings)
        found = {}
        for lr in settings.rates:
            search = lambda m=make, r=lr: m(settings.search_period, r).step()  # noqa: E731
            found[lr] = results.cell(f"search, {name}, lr {lr:g}", search)["trained"]
        best = max(found, key=found.__getitem__)
        results.cell(name, lambda m=make, r=best: m(settings.period, r).whole())


def draw(results: Results, settings: Settings) -> Path:
    cells = results.cells
    print(f"dense {cells['dense']:.2f}")
    figure, ((axis,),) = drawing.panels()
    for number, name in enumerate(name for name in METHODS if name in cells):
        rows = cells[name]["steps"]
        steps = [i + offset for i in range(len(rows)) for offset in (0, 0.7)]
        values = [row[key] for row in rows for key in ("pruned", "trained")]
        axis.plot(steps, values, label=f"{name}: after pruning, after training", **drawing.style(number))
        ends = drawing.curve((i + 0.7, row["finished"]) for i, row in enumerate(rows) if "finished" in row)
        spent = [round(sum(row[key] for row in rows)) for key in ("pruning_seconds", "training_seconds")]
        print(f"{name}: learning rate {cells[name]['learning_rate']:g}, {ends[1]} %, pruning and training {spent} s")
        axis.plot(*ends, f"C{number}*", markersize=11, label=f"{name}: after the last training")
    axis.axhline(cells["dense"], color="0.6", linewidth=1, linestyle="--")
    axis.set_xticks(range(len(settings.schedule)), [f"{100 * sparsity:.1f} %" for sparsity in settings.schedule])
    axis.set(xlabel="sparsity", ylabel="test accuracy, %", title="ResNet20 on CIFAR-10, pruned gradually")
    axis.legend(fontsize=8)
    return drawing.save(figure, results.picture)


RECIPE = Recipe(
    "table3", "gradual pruning, practical schedules (table 3)", measure, draw, Settings(),
    Settings((0.5, 0.6), (0.6,), (0.005,), 8, 8, 8, 5, 2, 2, 2, 10, tiny=True), 20, "gradual_resnet20",
    "python -m experiments.gradual_pruning run",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plot"])
    parser.add_argument("--only", choices=METHODS, default="", help="one of the two, so that both can run in parallel")
    given = parser.parse_args()
    if given.what == "run":
        RECIPE.run(Request(only=given.only))
    else:
        shutil.copy(RECIPE.plot(Request()), IMAGES / "gradual.png")


if __name__ == "__main__":
    main()

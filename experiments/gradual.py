"""Gradual pruning by a plan: the sparsity before each epoch and its learning rate; resumable. For tables 1 and 3."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.image_task import ImageTask, image_task
from experiments.recipe import Request, Results
from experiments.training import Checkpoint, cross_entropy, file_of
from mfac.pruning import attach_masks


@dataclass(frozen=True)
class Plan:
    """When to prune, and how to train in between."""

    prune_at: dict[int, float]  # {epoch: the sparsity that is reached before it}
    epochs: int
    lr: Callable[[int], float]  # of an epoch
    pruning: dict[str, Any] = field(default_factory=dict)  # arguments of `mfac.prune`
    weight_decay: float = 0.0
    reset_momentum: bool = False  # after each pruning step
    batch_size: int = 256
    gradient_batch: int = 16
    epoch_batches: int | None = None  # None: all of them

    def described(self) -> dict[str, Any]:
        return vars(self) | {"lr": [round(self.lr(epoch), 8) for epoch in range(self.epochs)]}


class GradualRun:
    """A trained model on its way through a plan, saved after every epoch, tested every `test_every` epochs."""

    def __init__(self, model: nn.Module, plan: Plan, task: ImageTask, keep: Path | None = None, test_every: int = 1):
        self.model, self.plan, self.task, self.test_every = model, plan, task, test_every
        self.optimizer = torch.optim.SGD(model.parameters(), plan.lr(0), momentum=0.9, weight_decay=plan.weight_decay)
        self.masks: dict[str, torch.Tensor] = {}
        self.keeper = attach_masks(self.optimizer, self.masks, model)
        self.checkpoint = Checkpoint(keep, model=model, optimizer=self.optimizer)

    def run(self) -> dict[str, Any]:
        """A row for every epoch: sparsity, seconds, accuracy after pruning and after training."""
        record = self.checkpoint.load() or {"rows": [], "masks": {}}
        rows: list[dict[str, Any]] = record["rows"]
        self._hold(record["masks"])
        for epoch in range(len(rows), self.plan.epochs):
            rows.append(self._epoch(epoch))
            print(f"  epoch {epoch + 1} of {self.plan.epochs}: {rows[-1]}", flush=True)
            self.checkpoint.save(rows=rows, masks=self.masks)
        self.checkpoint.remove()
        return {"rows": rows}

    def _epoch(self, epoch: int) -> dict[str, Any]:
        row: dict[str, Any] = {"epoch": epoch}
        if epoch in self.plan.prune_at:
            began = time.process_time()
            row |= {"sparsity": self._prune(epoch), "pruning_seconds": round(time.process_time() - began, 2)}
            row["pruned"] = self.task.test(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr(epoch)
        began = time.process_time()
        self._train(epoch)
        row["training_seconds"] = round(time.process_time() - began, 2)
        last = epoch == self.plan.epochs - 1
        if last or epoch % self.test_every == 0 or epoch + 1 in self.plan.prune_at:
            row["trained"] = self.task.test(self.model)
        return row

    def _prune(self, epoch: int) -> float:
        """As `GradualPruner.step`, which has no baselines."""
        number = list(self.plan.prune_at).index(epoch)
        batches = self.task.batches(self.plan.gradient_batch, 1000 + number)
        result = prune(self.model, cross_entropy, batches, self.plan.prune_at[epoch], masks=self.masks, seed=number,
                       progress=False, **self.plan.pruning)  # fmt: skip
        self._hold(result.masks)
        for state in self.optimizer.state.values() if self.plan.reset_momentum else ():
            state["momentum_buffer"].zero_()
        return result.sparsity

    def _hold(self, masks: dict[str, torch.Tensor]) -> None:
        self.masks = masks
        self.keeper.update(masks)

    def _train(self, epoch: int) -> None:
        self.model.train()
        for batch in itertools.islice(self.task.batches(self.plan.batch_size, epoch), self.plan.epoch_batches):
            self.optimizer.zero_grad()
            cross_entropy(self.model, batch).backward()
            self.optimizer.step()
        self.model.eval()


def run_plans(name: str, request: Request, plans: dict[str, Plan], test_images: int, test_every: int) -> None:
    results, task = Results(name, request), image_task(request, test_images)
    results.settings(plans={label: plan.described() for label, plan in plans.items()}, test_images=test_images)
    results.cell("dense", lambda: task.test(task.model()))
    for label, plan in plans.items():
        if request.wants(label):
            keep = None if request.size == "smoke" else file_of(f"{name}_{request.size}_{label}")
            results.cell(label, lambda a=(plan, task, keep, test_every): GradualRun(task.model(), *a).run())


def plot_plans(name: str, request: Request, title: str) -> Path:
    """Accuracy during pruning; the drops are the pruning steps."""
    results = Results(name, request)
    curves = {}
    for label, cell in results.cells.items():
        if label == "dense":
            continue
        points = []
        for row in cell["rows"]:
            if "pruned" in row:
                points.append((row["epoch"], row["pruned"]["accuracy"]))
            if "trained" in row:
                points.append((row["epoch"] + 1, row["trained"]["accuracy"]))
        curves[label] = drawing.curve(points)
        sparsity = [row["sparsity"] for row in cell["rows"] if "sparsity" in row][-1]
        spent = sum(row.get("pruning_seconds", 0) for row in cell["rows"])
        print(f"{label}: {points[-1][1]:.2f} % at a sparsity of {sparsity:.4f}, {spent:.0f} s of pruning")
    print(f"dense: {results.cells['dense']['accuracy']:.2f} %")
    return drawing.lines(results.picture, curves, x="epoch", y="test accuracy, %", title=title)

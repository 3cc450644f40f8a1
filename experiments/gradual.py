"""Gradual pruning by a plan: which sparsity before which epoch, and the learning rate of every epoch; resumable."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfac
from experiments.training import cross_entropy
from mfac.pruning import GradualPruner
from mfac.pruning.atomic_file import replacing

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


@dataclass(frozen=True)
class Plan:
    """What happens when.

    Args:
        prune_at: {epoch: the sparsity that is reached before it}.
        epochs: in all.
        lr: of an epoch.
        weight_decay: of SGD.
        reset_momentum: after each pruning step.
        pruning: arguments of `mfac.prune`.
        batch_size: of training.
        gradient_batch: images of each gradient.
        epoch_batches: how many batches count as an epoch; None: all of them.
    """

    prune_at: dict[int, float]
    epochs: int
    lr: Callable[[int], float]
    pruning: dict[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.0
    reset_momentum: bool = False
    batch_size: int = 256
    gradient_batch: int = 16
    epoch_batches: int | None = None


class GradualRun:
    """A model on its way through a plan, saved after every epoch.

    Args:
        model: trained.
        plan: what happens.
        batches: (batch size, seed) -> training batches.
        test: model -> figures.
        keep: a file for the state; None: none.
        test_every: epochs; besides, every pruning step and the end are tested.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        batches: Callable[[int, int], Any],
        test: Callable[[nn.Module], dict[str, float]],
        keep: Path | None = None,
        test_every: int = 1,
    ):
        self.model, self.plan, self.batches, self.test = model, plan, batches, test
        self.keep, self.test_every = keep, test_every
        self.optimizer = torch.optim.SGD(model.parameters(), plan.lr(0), momentum=0.9, weight_decay=plan.weight_decay)
        self.pruner = GradualPruner(
            model, LOSS, lambda step: batches(plan.gradient_batch, 1000 + step), list(plan.prune_at.values()),
            optimizer=self.optimizer, reset_momentum=plan.reset_momentum, progress=False, **plan.pruning,
        )  # fmt: skip
        self.rows: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """A row for every epoch: sparsity, seconds, accuracy after pruning and after training."""
        self._resume()
        for epoch in range(len(self.rows), self.plan.epochs):
            self.rows.append(self._epoch(epoch))
            print(f"  epoch {epoch + 1} of {self.plan.epochs}: {self.rows[-1]}", flush=True)
            self._save()
        if self.keep is not None:
            self.keep.unlink(missing_ok=True)
        return {"rows": self.rows}

    def _epoch(self, epoch: int) -> dict[str, Any]:
        row: dict[str, Any] = {"epoch": epoch}
        if epoch in self.plan.prune_at:
            began = time.process_time()
            result = self.pruner.step()
            assert result is not None
            row |= {"sparsity": result.sparsity, "pruning_seconds": round(time.process_time() - began, 2)}
            row["pruned"] = self.test(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr(epoch)
        began = time.process_time()
        self._train(epoch)
        row["training_seconds"] = round(time.process_time() - began, 2)
        last = epoch == self.plan.epochs - 1
        if last or epoch % self.test_every == 0 or epoch + 1 in self.plan.prune_at:
            row["trained"] = self.test(self.model)
        return row

    def _train(self, epoch: int) -> None:
        self.model.train()
        for batch in itertools.islice(self.batches(self.plan.batch_size, epoch), self.plan.epoch_batches):
            self.optimizer.zero_grad()
            cross_entropy(self.model, batch).backward()
            self.optimizer.step()
        self.model.eval()

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "pruner": self.pruner}

    def _save(self) -> None:
        if self.keep is None:
            return
        self.keep.parent.mkdir(parents=True, exist_ok=True)
        state = {name: part.state_dict() for name, part in self._parts().items()}
        with replacing(self.keep) as draft:
            torch.save(state | {"rows": self.rows}, draft)

    def _resume(self) -> None:
        if self.keep is None or not self.keep.exists():
            return
        state = torch.load(self.keep, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.rows = state["rows"]
        print(f"  resumed after epoch {len(self.rows)} of {self.plan.epochs}", flush=True)

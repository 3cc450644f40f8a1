"""Training that can stop anywhere and go on to the same bits: the loop, and where in it a run is."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.app.runs.measures import finite
from mfac.app.runs.random_state import random_state, set_random_state
from mfac.app.runs.task_batches import TaskBatches, epoch
from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn

EPOCHS_A_SEED = 1 << 20  # the seeds of epochs of one run do not meet those of another


class TrainingLoop:
    """Steps of an optimizer over epochs of batches.

    The order of an epoch depends on `seed` and the number of the epoch alone, so that a run that is taken up in
    mid-epoch draws the epoch again and leaves out what it has had. Dropout and the like draw from the global random
    state, which is part of the state.

    Args:
        model: trained in place.
        loss_fn: (model, batch) -> scalar.
        batches: the task's.
        optimizer: whatever moves the model's parameters.
        seed: of the order of batches.
        cosine_steps: lower the learning rates to zero over so many steps; None: they stay.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batches: TaskBatches,
        optimizer: Optimizer,
        *,
        seed: int,
        cosine_steps: int | None = None,
    ):
        self.losses: list[float | None] = []
        self.seconds: list[float] = []
        self._model, self._loss_fn, self._batches, self._optimizer = model, loss_fn, batches, optimizer
        self._seed, self._cosine_steps = seed, cosine_steps
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._epoch = self._batch = 0
        self._rest: Iterator[Batch] | None = None  # of the present epoch

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    @property
    def is_diverged(self) -> bool:
        """Whether the last loss was not finite; training stops there."""
        return bool(self.losses) and self.losses[-1] is None

    def run(self, until: int, after_step: Callable[[], None] = lambda: None) -> None:
        """Trains until so many steps are done in all, or the loss is not finite; `after_step` is not timed.

        Raises:
            ValueError: an epoch has no batch.
        """
        self._model.train()
        while self.step < until and not self.is_diverged:
            began = time.perf_counter()
            self._train_on(self._next_batch())
            self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + time.perf_counter() - began)
            after_step()

    def _next_batch(self) -> Batch:
        while True:
            if self._rest is None:
                seed = self._seed * EPOCHS_A_SEED + self._epoch
                self._rest = islice(epoch(self._batches, seed), self._batch, None)
            for batch in self._rest:
                self._batch += 1
                return batch
            if not self._batch:
                raise ValueError("train_batches() gives no batch; at least one is needed")
            self._epoch, self._batch, self._rest = self._epoch + 1, 0, None

    def _train_on(self, batch: Batch) -> None:
        if self._cosine_steps is not None:
            share = 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self._cosine_steps)))
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * share
        self._optimizer.zero_grad()
        loss: Tensor = self._loss_fn(self._model, batch)
        value = finite(float(loss.detach()))
        if value is not None:
            loss.backward()
            self._optimizer.step()
        self.losses.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs, for `torch.save`; save it before the next step."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": list(self.losses),
            "seconds": list(self.seconds),
            "epoch": self._epoch,
            "batch": self._batch,
            "random": random_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state, random state included."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = list(state["losses"]), list(state["seconds"])
        self._epoch, self._batch, self._rest = state["epoch"], state["batch"], None
        set_random_state(state["random"])

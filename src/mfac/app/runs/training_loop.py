"""A training loop that can be saved between any two steps and resumed to the bit."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.app.runs.measures import finite
from mfac.app.runs.random_state import random_state, set_random_state
from mfac.app.runs.task_batches import TaskBatches, epoch

EPOCHS_PER_SEED = 1 << 20  # keeps the seeds of the epochs of two runs apart


class TrainingLoop:
    """Steps of an optimizer over epochs of batches.

    The order of an epoch depends only on `seed` and the epoch's number: a run resumed in the middle of an epoch draws
    it again and skips the batches it has seen. Dropout draws from the global random state, which is part of the state.
    The learning rates fall to zero over `cosine_steps`; None: they are constant.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
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
        self._rest: Iterator[Any] | None = None  # of the present epoch

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def is_diverged(self) -> bool:
        """Whether the last loss was not finite, which ends the training."""
        return bool(self.losses) and self.losses[-1] is None

    def take_step(self) -> None:
        """Trains on the next batch.

        Raises:
            ValueError: an epoch has no batches.
        """
        self._model.train()
        began = time.perf_counter()
        self._train_on(self._next_batch())
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + time.perf_counter() - began)

    def _next_batch(self) -> Any:
        while True:
            if self._rest is None:
                seed = self._seed * EPOCHS_PER_SEED + self._epoch
                self._rest = islice(epoch(self._batches, seed), self._batch, None)
            for batch in self._rest:
                self._batch += 1
                return batch
            if not self._batch:
                raise ValueError("train_batches() returned no batches; at least one is required")
            self._epoch, self._batch, self._rest = self._epoch + 1, 0, None

    def _train_on(self, batch: Any) -> None:
        if self._cosine_steps is not None:
            factor = 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self._cosine_steps)))
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        self._optimizer.zero_grad()
        loss = self._loss_fn(self._model, batch)
        value = finite(float(loss.detach()))
        if value is not None:
            loss.backward()
            self._optimizer.step()
        self.losses.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for `torch.save`, to be saved before the next step."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": list(self.losses),
            "seconds": list(self.seconds),
            "epoch": self._epoch,
            "batch": self._batch,
            "random": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a saved state, random state included."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = list(state["losses"]), list(state["seconds"])
        self._epoch, self._batch, self._rest = state["epoch"], state["batch"], None
        set_random_state(state["random"])

"""The training loop of the recipes: losses, seconds, tests and checkpoints."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mfac
from experiments.datasets.folder import data_folder
from mfac.gradients.batches import move
from mfac.saved import replacing

RUNS = data_folder().parent / "runs"  # checkpoints of unfinished runs, and networks that were trained once
Factor = Callable[[float], float]
cross_entropy = mfac.criterion_loss(nn.CrossEntropyLoss())


def cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    return 1 - progress


def drops(*places: float, factor: float = 0.1) -> Factor:
    """`factor` to the power of the number of places (fractions of the training) passed so far."""
    return lambda progress: factor ** sum(progress >= place for place in places)


def compute_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Fills `.grad`; for AdaHessian, which differentiates a second time, with the graph of the gradients."""
    if type(optimizer).__name__ != "AdaHessian":
        loss.backward()
        return
    # Not by backward, which would create a reference cycle between parameters and graph.
    tensors = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(tensors, torch.autograd.grad(loss, tensors, create_graph=True), strict=True):
        p.grad = gradient


def file_of(key: str) -> Path:
    return RUNS / f"{key}.pt".replace(" ", "_").replace(",", "")


class Training:
    """Trains a model in place for `steps` steps, the learning rate times `factor(fraction of steps done)`.

    `test` is called every `test_every` steps and at the end, and is not part of the seconds. A checkpoint is saved in
    `keep` after every pass over the batches, with the state of their `generator`, if they have one.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], steps: int, factor: Factor, *,
        test: Callable[[nn.Module], dict[str, float]] | None = None, test_every: int = 10**9,
        loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy, keep: Path | None = None,
    ):  # fmt: skip
        self.model, self.optimizer, self.batches, self.steps = model, optimizer, batches, steps
        self.device = next(model.parameters()).device
        self.test, self.test_every, self.loss_fn = test, test_every, loss_fn
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: factor(min(1.0, t / steps)))
        self.keep, self.parts = keep, {"model": model, "optimizer": optimizer, "scheduler": self.scheduler}
        self.losses, self.clock, self.tests = list[float](), list[float](), list[dict[str, float]]()
        self.note: Callable[[dict[str, Any]], None] | None = None  # gets the record whenever a checkpoint is saved

    def run(self) -> dict[str, Any]:
        """{finished, losses, seconds (processor time after every step), tests}."""
        self._resume()
        while len(self.losses) < self.steps:
            for batch in self.batches:
                if not self._step(batch):
                    return self._record(finished=False)
                if len(self.losses) == self.steps:
                    break
            self._save()
        if self.keep is not None:
            self.keep.unlink(missing_ok=True)
        return self._record(finished=True)

    def _step(self, batch: Any) -> bool:
        """False if the loss is no longer finite."""
        self.model.train()
        began = time.process_time()
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model, move(batch, self.device))
        value = float(loss.detach())
        if not math.isfinite(value):
            return False
        compute_gradients(self.model, self.optimizer, loss)
        try:
            self.optimizer.step()
        except RuntimeError as error:  # a gradient that is not finite, or a matrix that cannot be factored
            print(f"  stopped at step {len(self.losses) + 1}: {error}", flush=True)
            return False
        self.scheduler.step()
        spent = time.process_time() - began
        self.losses.append(round(value, 5))
        self.clock.append(round((self.clock[-1] if self.clock else 0.0) + spent, 4))
        done = len(self.losses)
        if self.test is not None and (done % self.test_every == 0 or done == self.steps):
            self.model.eval()
            self.tests.append({"step": done, **self.test(self.model)})
            shown = ", ".join(f"{key} {value:.4g}" for key, value in self.tests[-1].items())
            print(f"  {shown} of {self.steps}: loss {value:.3f}, {self.clock[-1]:.0f} s", flush=True)
        return True

    def _record(self, finished: bool) -> dict[str, Any]:
        return {"finished": finished, "losses": self.losses, "seconds": self.clock, "tests": self.tests}

    def _save(self) -> None:
        if self.keep is not None:
            self.keep.parent.mkdir(parents=True, exist_ok=True)
            generator = getattr(self.batches, "generator", None)
            record = {"losses": self.losses, "clock": self.clock, "tests": self.tests, "random": torch.get_rng_state(),
                      "order": None if generator is None else generator.get_state()}  # fmt: skip
            with replacing(self.keep) as draft:
                torch.save({name: part.state_dict() for name, part in self.parts.items()} | {"record": record}, draft)
        if self.note is not None:
            self.note(self._record(finished=False) | {"partial": True})

    def _resume(self) -> None:
        if self.keep is None or not self.keep.exists():
            return
        state = torch.load(self.keep, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        record = state["record"]
        torch.set_rng_state(record.pop("random"))
        order = record.pop("order")
        if order is not None:
            self.batches.generator.set_state(order)  # type: ignore[attr-defined]
        vars(self).update(record)
        print(f"  resumed at step {len(self.losses)} of {self.steps}", flush=True)


def last_loss(run: dict[str, Any]) -> float:
    """The mean loss of the last tenth of a run; infinite if it diverged."""
    tail = max(1, len(run["losses"]) // 10)
    return sum(run["losses"][-tail:]) / tail if run["finished"] else math.inf

"""The loop behind every recipe that trains: losses, seconds, tests, and a checkpoint after each pass over the data."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.pruning.atomic_file import replacing

Factor = Callable[[float], float]


def cosine(progress: float) -> float:
    """From 1 to 0 by a cosine."""
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    """From 1 to 0 in a straight line."""
    return 1 - progress


def drops(*places: float, factor: float = 0.1) -> Factor:
    """`factor` to the number of places (shares of the training) passed so far."""
    return lambda progress: factor ** sum(progress >= place for place in places)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of a batch (images, labels)."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def compute_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Fills `.grad`; for AdaHessian, which differentiates once more, with the graph of the gradients."""
    if type(optimizer).__name__ != "AdaHessian":
        loss.backward()
        return
    # Not by backward, which would make a cycle of references of parameters and graph.
    tensors = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(tensors, torch.autograd.grad(loss, tensors, create_graph=True), strict=True):
        p.grad = gradient


class Training:
    """One run: `steps` steps over passes of `batches`, the learning rate times `factor(progress)`.

    Args:
        model: trained in place.
        optimizer: of its parameters.
        batches: an iterable for every pass; a `generator` in it is saved and resumed.
        steps: in all; the last pass may be cut.
        factor: of the share of steps done so far.
        test: model -> figures, called after every `test_every` steps and at the end; its time does not count.
        test_every: steps.
        loss_fn: (model, batch) -> loss.
        keep: a file for checkpoints; None: none.
        keep_every: passes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[Any],
        steps: int,
        factor: Factor,
        *,
        test: Callable[[nn.Module], dict[str, float]] | None = None,
        test_every: int = 10**9,
        loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy,
        keep: Path | None = None,
        keep_every: int = 1,
    ):
        self.model, self.optimizer, self.batches, self.steps = model, optimizer, batches, steps
        self.test, self.test_every, self.loss_fn = test, test_every, loss_fn
        self.keep, self.keep_every = keep, keep_every
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: factor(min(1.0, t / steps)))
        self.losses: list[float] = []
        self.clock: list[float] = []
        self.tests: list[dict[str, float]] = []
        self.passes = 0

    def run(self) -> dict[str, Any]:
        """{finished, losses, seconds (processor time so far, of every step), tests}."""
        self._resume()
        while len(self.losses) < self.steps:
            for batch in self.batches:
                if not self._step(batch):
                    return self._record(finished=False)
                if len(self.losses) == self.steps:
                    break
            self.passes += 1
            if self.keep is not None and self.passes % self.keep_every == 0:
                self._save()
        if self.keep is not None:
            self.keep.unlink(missing_ok=True)
        return self._record(finished=True)

    def _step(self, batch: Any) -> bool:
        """Trains on one batch; False where the loss is not finite any more."""
        self.model.train()
        began = time.process_time()
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            return False
        compute_gradients(self.model, self.optimizer, loss)
        try:
            self.optimizer.step()
        except RuntimeError as error:  # a gradient that is not finite, or a matrix that cannot be factored any more
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

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def _save(self) -> None:
        assert self.keep is not None
        self.keep.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts().items()}
        generator = getattr(self.batches, "generator", None)
        state["batches"] = None if generator is None else generator.get_state()
        state["random"] = torch.get_rng_state()
        state["record"] = {"losses": self.losses, "clock": self.clock, "tests": self.tests, "passes": self.passes}
        with replacing(self.keep) as draft:
            torch.save(state, draft)

    def _resume(self) -> None:
        """Goes on after the last pass that was saved."""
        if self.keep is None or not self.keep.exists():
            return
        state = torch.load(self.keep, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        if state["batches"] is not None:
            self.batches.generator.set_state(state["batches"])  # type: ignore[attr-defined]
        torch.set_rng_state(state["random"])
        for name, value in state["record"].items():
            setattr(self, name, value)
        print(f"  resumed at step {len(self.losses)} of {self.steps}", flush=True)


def last_loss(run: dict[str, Any]) -> float:
    """The mean loss of the last tenth of a run; infinite for one that diverged."""
    tail = max(1, len(run["losses"]) // 10)
    return sum(run["losses"][-tail:]) / tail if run["finished"] else math.inf

"""A plan: what a run would hold, how long it would take, and what to change where it does not fit."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from mfac.app.plan.memory import PruningMemory, WindowMemory
from mfac.app.plan.timing import pruning_algebra, time_gradients, window_step
from mfac.app.tasks import Task
from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn
from mfac.layout import ParameterLayout
from mfac.memory import available_memory, gib
from mfac.parameter_window import row_dtype
from mfac.pruning.schedules import geometric_schedule
from mfac.pruning.targets import Names, choose_targets
from mfac.windows import Window, as_kind

LOSS_BATCHES = 4  # what `prune` takes the loss on after each recomputation


@dataclass(frozen=True)
class Plan:
    """Figures before a run.

    Args:
        kind: "prune" or "train".
        name: of the task or the model.
        settings: what was planned for.
        weights: of the model: {"all", "trained", "prunable"}.
        memory: {what: bytes}, besides the model itself.
        available: bytes that could be allocated now; None where there is no way to know.
        on_disk: {"bytes", "pages"} of the rows in a file; pruning only.
        seconds: estimates for "gradients", "algebra" and, in pruning, "losses"; their sum is that of the run.
        gradient_seconds: of one gradient, as measured.
        remedies: settings that would fit; empty where these do.
    """

    kind: str
    name: str
    settings: dict[str, Any]
    weights: dict[str, int]
    memory: dict[str, int]
    available: int | None
    on_disk: dict[str, int]
    seconds: dict[str, float]
    gradient_seconds: float
    remedies: list[str] = field(default_factory=list)

    @property
    def needed(self) -> int:
        """Bytes in all."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether that is available."""
        return self.available is None or self.needed <= self.available

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "settings": self.settings,
            "weights": self.weights,
            "memory": {**self.memory, "total": self.needed},
            "available": self.available,
            "fits": self.fits,
            "on_disk": self.on_disk,
            "seconds": {**self.seconds, "total": sum(self.seconds.values())},
            "gradient_seconds": self.gradient_seconds,
            "remedies": self.remedies,
        }

    def text(self) -> str:
        """A table for people."""
        title = f"{'Pruning' if self.kind == 'prune' else 'Training'} {self.name}: "
        settings = ", ".join(f"{key} {'none' if value is None else value}" for key, value in self.settings.items())
        lines = [title + settings, "", "weights"]
        lines += [_line(name, f"{count:,}") for name, count in self.weights.items()]
        lines += ["", "memory, besides the model"]
        lines += [_line(name, gib(size)) for name, size in self.memory.items()]
        known = "unknown" if self.available is None else gib(self.available)
        lines += [_line("in all", gib(self.needed)), _line("available", known)]
        if self.on_disk:
            pages = self.on_disk["pages"]
            lines.append(_line("G on disk, in pages", f"{gib(self.on_disk['bytes'])}, {pages:,}"))
        lines += ["", f"time, from {self.gradient_seconds * 1e3:.3g} ms a gradient and short samples of the algebra"]
        lines += [_line(self._work(name), duration(value)) for name, value in self.seconds.items()]
        lines += [_line("in all", duration(sum(self.seconds.values()))), "", self._verdict()]
        return "\n".join(lines)

    def _work(self, name: str) -> str:
        """What the seconds of `name` are spent on, in words."""
        s = self.settings
        if self.kind == "train":
            return {"gradients": f"{s['steps']:,} gradients", "algebra": f"{s['steps']:,} steps of M-FAC"}[name]
        return {
            "gradients": f"{s['recomputations']} x {s['num_grads']:,} gradients",
            "algebra": f"algebra of {s['recomputations']} recomputations",
            "losses": f"loss on {LOSS_BATCHES} batches after each",
        }[name]

    def _verdict(self) -> str:
        if self.fits:
            return "It fits."
        ways = "; ".join(self.remedies) or "a larger machine: no number of gradients or size of blocks does"
        return f"It does not fit. What would: {ways}."


def make_plan(
    subject: Task | nn.Module,
    loss_fn: LossFn | None = None,
    batches: Iterable[Batch] | None = None,
    *,
    kind: Literal["prune", "train"] = "prune",
    num_grads: int = 64,
    block_size: int | None = 128,
    recomputations: int = 16,
    sparsity: float = 0.9,
    damping: float = 1e-5,
    targets: Names = None,
    ignore: Names = None,
    per_sample: bool = False,
    on_disk: bool = False,
    window: Window | None = None,
    momentum: float = 0.0,
    steps: int = 1000,
    device: torch.device | str | None = None,
) -> Plan:
    """What `mfac.prune` or training with `mfac.MFAC` would take. Nothing of the size of G is allocated.

    Args:
        subject: a task, or a model with `loss_fn` and `batches`.
        loss_fn: (model, batch) -> scalar.
        batches: any iterable of batches; some of them are used for timing.
        kind: "prune" or "train".
        num_grads: m.
        block_size: of pruning's Fisher matrix; None: all of it.
        recomputations: of pruning.
        sparsity: that pruning is to reach; fewer weights are left at every recomputation.
        damping: λ, which with the gradients' size decides the precision of pruning's products.
        targets: what is pruned; as for `mfac.prune`.
        ignore: what is not; as for `mfac.prune`.
        per_sample: one gradient a sample, for pruning.
        on_disk: pruning keeps its rows in a file.
        window: how the optimizer stores its rows, as for `mfac.MFAC`; None: as they are computed.
        momentum: of the optimizer.
        steps: of training.
        device: where a task's model is put; None: where it is made.

    Raises:
        ValueError: an argument out of its range, or a model without loss and batches.
    """
    _check(kind, {"num_grads": num_grads, "recomputations": recomputations, "steps": steps}, sparsity)
    work = _work(subject, loss_fn, batches, device)
    if kind == "train":
        trained = [name for name, p in work.model.named_parameters() if p.requires_grad]
        layout = ParameterLayout(work.model, trained)
        computed = row_dtype(layout)
        window_memory = WindowMemory(layout.dim, num_grads, window or computed, computed, momentum != 0)
        return _plan_training(work, layout, window_memory, steps)
    layout = ParameterLayout(work.model, list(choose_targets(work.model, targets, ignore)))
    memory = PruningMemory(layout.sizes, num_grads, block_size, layout.dtype, on_disk)
    kept = [1.0, *(1 - s for s in geometric_schedule(0.0, sparsity, recomputations)[:-1])]
    return _plan_pruning(work, layout, memory, kept, sparsity, damping, per_sample)


@dataclass(frozen=True)
class _Work:
    model: nn.Module
    loss_fn: LossFn
    batches: Iterable[Batch]
    name: str

    def weights(self) -> dict[str, int]:
        parameters = list(self.model.parameters())
        return {
            "all": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
        }


def _plan_pruning(
    work: _Work,
    layout: ParameterLayout,
    memory: PruningMemory,
    kept: list[float],
    sparsity: float,
    damping: float,
    per_sample: bool,
) -> Plan:
    """`kept`: the fraction of the weights that each recomputation begins with."""
    gradient = time_gradients(work.model, work.loss_fn, work.batches, list(layout.names), per_sample)
    algebra = pruning_algebra(memory, damping, gradient.norm, layout.device)
    steps, m, items = len(kept), memory.num_grads, memory.items()
    return Plan(
        kind="prune",
        name=work.name,
        settings={
            "num_grads": m,
            "block_size": memory.block_size,
            "recomputations": steps,
            "sparsity": sparsity,
            "per_sample": per_sample,
            "on_disk": memory.on_disk,
        },
        weights={**work.weights(), "prunable": memory.dim},
        memory=items,
        available=available_memory(layout.device),
        on_disk={"bytes": memory.row_bytes, "pages": memory.pages},
        seconds={
            "gradients": steps * m * gradient.row,
            "algebra": sum(algebra(round(part * memory.dim)) for part in kept),
            "losses": (steps + 1) * LOSS_BATCHES * gradient.loss,
        },
        gradient_seconds=gradient.row,
        remedies=_remedies(memory, items, layout.device),
    )


def _plan_training(work: _Work, layout: ParameterLayout, memory: WindowMemory, steps: int) -> Plan:
    gradient = time_gradients(work.model, work.loss_fn, work.batches, list(layout.names), per_sample=False)
    items = memory.items()
    return Plan(
        kind="train",
        name=work.name,
        settings={
            "num_grads": memory.num_grads,
            "window": as_kind(memory.window).name,
            "momentum": memory.momentum,
            "steps": steps,
        },
        weights=work.weights(),
        memory=items,
        available=available_memory(layout.device),
        on_disk={},
        seconds={
            "gradients": steps * gradient.row,
            "algebra": steps * window_step(memory, layout.device),
        },
        gradient_seconds=gradient.row,
        remedies=_remedies(memory, items, layout.device),
    )


def _remedies(memory: PruningMemory | WindowMemory, items: dict[str, int], device: torch.device) -> list[str]:
    available = available_memory(device)
    return [] if available is None or sum(items.values()) <= available else memory.remedies(available)


def _work(
    subject: Task | nn.Module,
    loss_fn: LossFn | None,
    batches: Iterable[Batch] | None,
    device: torch.device | str | None,
) -> _Work:
    if isinstance(subject, Task):
        if loss_fn is not None or batches is not None:
            raise ValueError("a task has its own loss and batches; leave loss_fn and batches out")
        return _Work(subject.model().to(device), subject.loss, subject.train_batches(), subject.name)
    if not isinstance(subject, nn.Module):
        raise ValueError(f"make_plan takes a Task or a torch.nn.Module, not a {type(subject).__name__}")
    if loss_fn is None or batches is None:
        raise ValueError("a model alone says nothing of its data; pass loss_fn(model, batch) and batches, or a Task")
    return _Work(subject, loss_fn, batches, type(subject).__name__)


def _check(kind: str, counts: dict[str, int], sparsity: float) -> None:
    if kind not in ("prune", "train"):
        raise ValueError(f'kind must be "prune" or "train", not {kind!r}')
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive int, not {value!r}")
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity must be between 0 and 1, not {sparsity!r}")


def _line(name: str, value: str) -> str:
    return f"  {name:<42}{value:>14}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

"""A plan: the memory and time of a run, and which settings to change if it does not fit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mfac.app.plan.memory import PruningMemory, WindowMemory
from mfac.app.plan.timing import pruning_algebra, time_gradients, window_step
from mfac.app.tasks import Task
from mfac.gradients.model_state import seeded
from mfac.layout import ParameterLayout
from mfac.memory import available_memory, gib
from mfac.parameter_window import row_dtype
from mfac.pruning.options import PruningOptions
from mfac.pruning.schedules import geometric_schedule
from mfac.pruning.weights import Names, choose_targets
from mfac.windows.storage import Window, as_kind

LOSS_BATCHES = PruningOptions().loss_batches


@dataclass(frozen=True)
class Plan:
    """Estimates for a run of a kind ("prune" or "train") with some settings.

    `memory` is {what: bytes} besides the model; `available` is None if unknown; `on_disk` is about rows in a file;
    `seconds` has "gradients", "algebra" and, in pruning, "losses"; `remedies` are settings that fit.
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
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            **vars(self),
            "memory": {**self.memory, "total": self.needed},
            "seconds": {**self.seconds, "total": sum(self.seconds.values())},
            "fits": self.fits,
        }

    def text(self) -> str:
        """A table for people."""
        s = self.settings
        settings = ", ".join(f"{key} {'none' if value is None else value}" for key, value in s.items())
        known = "unknown" if self.available is None else gib(self.available)
        if self.kind == "prune":
            times = s["recomputations"]
            work = [f"{times} x {s['num_grads']:,} gradients", f"algebra of {times} recomputations"]
            work.append(f"loss on {LOSS_BATCHES} batches after each")
        else:
            work = [f"{s['steps']:,} gradients", f"{s['steps']:,} steps of M-FAC"]
        lines = [f"{'Pruning' if self.kind == 'prune' else 'Training'} {self.name}: {settings}", "", "weights"]
        lines += [_line(name, f"{count:,}") for name, count in self.weights.items()]
        lines += ["", "memory, besides the model", *(_line(name, gib(size)) for name, size in self.memory.items())]
        lines += [_line("in all", gib(self.needed)), _line("available", known)]
        if self.on_disk:
            lines.append(_line("G on disk, in pages", f"{gib(self.on_disk['bytes'])}, {self.on_disk['pages']:,}"))
        lines += ["", f"time, from {self.gradient_seconds * 1e3:.3g} ms per gradient and short samples of the algebra"]
        lines += [_line(name, duration(value)) for name, value in zip(work, self.seconds.values(), strict=True)]
        lines += [_line("in all", duration(sum(self.seconds.values()))), "", "It fits."]
        if not self.fits:
            ways = "; ".join(self.remedies) or "only a larger machine, for any number of gradients and block size"
            lines[-1] = f"It does not fit. What would: {ways}."
        return "\n".join(lines)


def make_plan(
    subject: Task | nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    batches: Iterable[Any] | None = None,
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
    """What `mfac.prune`, or training with `mfac.MFAC`, would take. Nothing of the size of G is allocated.

    Args:
        subject: a task, or a model with `loss_fn` and `batches`.
        loss_fn: (model, batch) -> scalar.
        batches: any iterable of batches; a few are used for timing.
        kind: "prune" or "train".
        num_grads: gradients per recomputation of pruning, or in the window of training.
        block_size: weights in a block of the Fisher matrix; None: the full matrix.
        recomputations: steps of pruning, each with new gradients.
        sparsity: fraction of weights to remove.
        damping: λ, which decides the precision of pruning's products.
        targets: names or "re:..." patterns of weights to prune; may be repeated.
        ignore: names or "re:..." patterns of weights to leave alone; may be repeated.
        per_sample: one gradient per sample instead of one per batch.
        on_disk: keep the gradients on disk (--rows-dir).
        window: how the optimizer stores its gradients; topk keeps 1 % of each.
        momentum: momentum of the optimizer.
        steps: steps of the optimizer.
        device: where a task's model is put; None: where it is made.

    Raises:
        ValueError: an invalid argument, or a model without loss and batches.
    """
    if kind not in ("prune", "train"):
        raise ValueError(f'kind must be "prune" or "train", not {kind!r}')
    PruningOptions(num_grads=num_grads, block_size=block_size, recomputations=recomputations)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive int, not {steps!r}")
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity must be between 0 and 1, not {sparsity!r}")
    model, loss, data, name = _parts(subject, loss_fn, batches, device)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    weights = {"all": sum(p.numel() for p in model.parameters())}
    weights["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    chosen = trained if kind == "train" else list(choose_targets(model, targets, ignore))
    layout = ParameterLayout(model, chosen)
    row, loss_seconds, norm = time_gradients(model, loss, data, list(layout.names), per_sample and kind == "prune")
    memory: PruningMemory | WindowMemory
    with seeded(0):
        if kind == "train":
            computed = row_dtype(layout)
            memory = WindowMemory(layout.dim, num_grads, window or computed, computed, momentum != 0)
            settings = {"window": as_kind(memory.window).name, "momentum": memory.momentum, "steps": steps}
            seconds = {"gradients": steps * row, "algebra": steps * window_step(memory, layout.device)}
            disk = {}
        else:
            memory = PruningMemory(layout.sizes, num_grads, block_size, layout.dtype, on_disk)
            settings = {"block_size": block_size, "recomputations": recomputations, "sparsity": sparsity}
            settings |= {"per_sample": per_sample, "on_disk": on_disk}
            weights["prunable"] = memory.dim
            algebra = pruning_algebra(memory, damping, norm, layout.device)
            kept = [1.0, *(1 - s for s in geometric_schedule(0.0, sparsity, recomputations)[:-1])]
            seconds = {"gradients": recomputations * num_grads * row}
            seconds["algebra"] = sum(algebra(round(part * memory.dim)) for part in kept)
            seconds["losses"] = (recomputations + 1) * LOSS_BATCHES * loss_seconds
            disk = {"bytes": memory.row_bytes, "pages": memory.pages}
    available, items = available_memory(layout.device), memory.items()
    fits = available is None or sum(items.values()) <= available
    remedies = [] if fits or available is None else list(memory.remedies(available))
    settings = {"num_grads": num_grads, **settings}
    return Plan(kind, name, settings, weights, items, available, disk, seconds, row, remedies)


def _parts(
    subject: Task | nn.Module, loss_fn: Any, batches: Any, device: torch.device | str | None
) -> tuple[nn.Module, Any, Any, str]:
    if isinstance(subject, Task):
        if loss_fn is not None or batches is not None:
            raise ValueError("a task has its own loss and batches; leave loss_fn and batches out")
        return subject.model().to(device), subject.loss, subject.train_batches(), subject.name
    if not isinstance(subject, nn.Module):
        raise ValueError(f"make_plan takes a Task or a torch.nn.Module, not a {type(subject).__name__}")
    if loss_fn is None or batches is None:
        raise ValueError("a model alone says nothing of its data; pass loss_fn(model, batch) and batches, or a Task")
    return subject, loss_fn, batches, type(subject).__name__


def _line(name: str, value: str) -> str:
    return f"  {name:<42}{value:>14}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"

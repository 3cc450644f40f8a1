"""`mfac plan`: the memory of a run and the number and time of its gradients, before anything large is allocated."""

import inspect
import timeit
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.training import CLASSES
from mfac.app.tasks import Task
from mfac.gradients import collect_gradients
from mfac.gradients.batches import num_samples, passes
from mfac.gradients.model_state import seeded
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout
from mfac.memory import available_memory, check_count, gib, parse_bytes
from mfac.pages import DISK_PIECE, WIDE_PIECE, block_runs
from mfac.parameter_window import row_dtype
from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.options import PruningOptions
from mfac.pruning.row_fisher import COPIES
from mfac.pruning.step import NUM_GRADS, ROWS_PER_BLOCK_SIZE, RowMethod, Step
from mfac.pruning.weights import MaskedWeights, Names, choose_targets
from mfac.windows.storage import Window, as_kind
from mfac.windows.topk import TopK

DEFAULTS = PruningOptions()
SUMMED_AT_ONCE, VECTORS = 32, 6  # rows that wait to be added to blocks; float64 vectors of a pruning step
SMALLER: tuple[Window, ...] = (torch.bfloat16, torch.int8, TopK())


@dataclass(frozen=True)
class Plan:
    """Estimates for a run with some settings."""

    kind: str  # "prune" or "train"
    name: str
    settings: dict[str, Any]
    weights: dict[str, int]
    memory: dict[str, int]  # {item: bytes} besides the model
    available: int | None  # None: unknown
    on_disk: dict[str, int]  # of rows in a file
    gradients: int  # how many the run makes
    gradient_seconds: float  # of each
    remedies: list[str]  # settings that fit

    @property
    def fits(self) -> bool:
        return self.available is None or sum(self.memory.values()) <= self.available

    def as_dict(self) -> dict[str, Any]:
        memory = {**self.memory, "total": sum(self.memory.values())}
        return {**vars(self), "memory": memory, "seconds": self.gradients * self.gradient_seconds, "fits": self.fits}

    def text(self) -> str:
        found = self.as_dict()
        settings = ", ".join(f"{key} {'none' if value is None else value}" for key, value in self.settings.items())
        memory = {name: gib(size) for name, size in found["memory"].items()}
        memory["available"] = "unknown" if self.available is None else gib(self.available)
        if self.on_disk:
            memory["G on disk, in pages"] = f"{gib(self.on_disk['bytes'])}, {self.on_disk['pages']:,}"
        ways = "; ".join(self.remedies) or "only a larger machine, for any number of gradients and block size"
        work = {"number": f"{self.gradients:,}", "time, without the algebra": duration(found["seconds"])}
        sections: dict[str, dict[str, str]] = {
            f"{'Pruning' if self.kind == 'prune' else 'Training'} {self.name}: {settings}": {},
            "weights": {name: f"{count:,}" for name, count in self.weights.items()},
            "memory, besides the model": memory,
            f"gradients, of {self.gradient_seconds * 1e3:.3g} ms each": work,
            "It fits." if self.fits else f"It does not fit. What would: {ways}.": {},
        }
        lines = {title: [f"  {key:<42}{value:>14}" for key, value in rows.items()] for title, rows in sections.items()}
        return "\n\n".join("\n".join([title, *rows]) for title, rows in lines.items())


@seeded(0)
def plan_pruning(
    task: Task,
    device: torch.device | str | None = None,
    num_grads: Annotated[int | None, "gradients per recomputation or in the window; none: the default"] = None,
    block_size: int | str | None = DEFAULTS.block_size,
    recomputations: int = DEFAULTS.recomputations,
    sparsity: Annotated[float, "fraction of weights to remove"] = 0.9,
    targets: Names = None,
    ignore: Names = None,
    per_sample: bool = DEFAULTS.per_sample,
    on_disk: Annotated[bool, "keep the gradients on disk (--rows-dir)"] = False,
    memory: int | str | None = None,
) -> Plan:
    """The memory and the gradients of `mfac.prune` with these options."""
    PruningOptions(num_grads, block_size, 1.0, recomputations, rows_dir="." if on_disk else None)  # checks them
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity must be between 0 and 1, not {sparsity!r}")
    settings = dict[str, Any](num_grads=num_grads, block_size=block_size, recomputations=recomputations)
    settings |= {"sparsity": sparsity, "per_sample": per_sample, "on_disk": on_disk}
    model = task.model().to(device)
    layout = ParameterLayout(model, list(choose_targets(model, targets, ignore)))
    available, weights = available_memory(layout.device), {**_weights(model), "prunable": layout.dim}
    disk, others, seconds = dict[str, int](), list[str](), _gradient_seconds(task, model, layout, per_sample)
    if isinstance(block_size, str):
        needed = _by_output(task, model, layout, settings, parse_bytes(memory))
    else:
        m = settings["num_grads"] = num_grads or NUM_GRADS
        disk = {"bytes": m * layout.dim * layout.dtype.itemsize, "pages": -(-layout.dim // max(1, DISK_PIECE // m))}
        needed = pruning_memory(layout.sizes, layout.dtype, m, block_size, on_disk)
        ways: dict[str, tuple[Any, ...]] = {"": (block_size, on_disk)}
        ways |= {} if on_disk else {f"rows on disk (--rows-dir, {gib(disk['bytes'])})": (block_size, True)}
        ways |= {f"block_size={size}": (size, on_disk) for size in (128, 32) if (block_size or layout.dim) > size}
        others = remedies(partial(pruning_memory, layout.sizes, layout.dtype), available, m, ways)
    count = recomputations * settings["num_grads"] * settings.get("passes", 1)
    return Plan("prune", task.name, settings, weights, needed, available, disk, count, seconds, others)


def _by_output(
    task: Task, model: nn.Module, layout: ParameterLayout, settings: dict[str, Any], room: int | None
) -> dict[str, int]:
    """{item: bytes}; outputs are measured in groups whose matrices fit, with more `passes` over the batches."""
    weights = MaskedWeights(model, dict(zip(layout.names, layout.tensors, strict=True)))
    options = PruningOptions(num_grads=settings["num_grads"], fisher="empirical", memory=room)
    start = Step(0, weights, weights.layout(), BatchStream(TaskBatches(task, layout.device)))
    method = RowMethod(task.loss, options, Ranks())
    settings["num_grads"], settings["passes"] = method.num_batches(start), method.measure(start).passes
    shapes = [weight.by_output(weight.tensor).shape for weight in weights.layers.values()]
    blocks = [8 * COPIES * inputs**2 for outputs, inputs in shapes for _ in range(outputs)]
    room = max(room or (available_memory(layout.device) or 2 * sum(blocks)) // 2, *blocks)  # an output at least
    return {"sums and factors of the blocks": min(sum(blocks), room), "vectors": VECTORS * 8 * layout.dim}


@seeded(0)
def plan_training(
    task: Task,
    device: torch.device | str | None = None,
    optimizer: Annotated[str, "optimizer whose window is planned"] = "full-matrix-adam",
    num_grads: int | None = None,
    window: Window | None = None,
    momentum: Annotated[float, "momentum of mfac"] = 0.0,
    steps: Annotated[int, "number of optimizer steps"] = 1000,
) -> Plan:
    """The memory and the gradients of training with an optimizer that has a window."""
    kind, model = CLASSES[optimizer][0], task.model().to(device)
    m = inspect.signature(kind).parameters["num_grads"].default if num_grads is None else num_grads
    check_count("steps", steps)
    layout = ParameterLayout(model, [name for name, tensor in model.named_parameters() if tensor.requires_grad])
    window, vector = window or row_dtype(layout), layout.dim * row_dtype(layout).itemsize
    settings = {"optimizer": optimizer, "num_grads": m, "window": as_kind(window).name, "steps": steps}
    more = {"momentum": momentum} if optimizer == "mfac" else {}

    def needed(num_grads: int, window: Window) -> dict[str, int]:
        rows = as_kind(window).bytes(num_grads, layout.dim)
        rest = kind.memory_needed(model.parameters(), num_grads, window=window, **more) - rows
        return {"window G": rows, "m x m matrices, state": rest, "gradient, row and step": 3 * vector}

    memory, available = needed(m, window), available_memory(layout.device)
    smaller = [kind for kind in SMALLER if needed(m, kind)["window G"] < memory["window G"]]
    ways = {"": (window,)} | {f"window={as_kind(kind).name}": (kind,) for kind in smaller}
    others, seconds = remedies(needed, available, m, ways), _gradient_seconds(task, model, layout)
    return Plan("train", task.name, settings | more, _weights(model), memory, available, {}, steps, seconds, others)


def pruning_memory(
    sizes: Sequence[int], dtype: torch.dtype, num_grads: int, block_size: int | None, on_disk: bool
) -> dict[str, int]:
    """{item: bytes} of one recomputation of `mfac.prune` over tensors of these sizes."""
    m, dim = num_grads, sum(sizes)
    runs = block_runs(dim, block_size, None if block_size is None else sizes)
    squares = 8 * sum(run.count * min(run.length, m) ** 2 for run in runs)
    found: dict[str, int] = {}
    if not on_disk and block_size is not None and m > ROWS_PER_BLOCK_SIZE * block_size:  # rows would take more memory
        found["rows to be summed"] = SUMMED_AT_ONCE * dim * dtype.itemsize
        found["sums of the blocks, two copies"] = 3 * squares
    elif on_disk:  # one page is read while another is worked on
        found["pages of G"] = dtype.itemsize * min(m * dim, 2 * DISK_PIECE)
    else:
        found["gradients G"] = dtype.itemsize * m * dim
    if block_size is None:  # G Gᵀ, its factor, the inverse of that, and G_R G_Rᵀ of the remaining weights
        found["m x m matrices"] = 4 * squares
        found["pieces in float64"] = 8 * min(WIDE_PIECE, m * dim)
    else:
        found["factors of the blocks"] = squares
    return {**found, "vectors": VECTORS * 8 * dim}


def remedies(needed: Any, available: int | None, num_grads: int, ways: dict[str, tuple[Any, ...]]) -> list[str]:
    """If the way without a text does not fit: each way, {text: arguments}, with as many of the gradients as fit."""
    found: list[str] = []
    for text, arguments in ways.items():
        needs = partial(lambda arguments, m: sum(needed(m, *arguments).values()), arguments)
        most = num_grads if available is None else bisect_right(range(1, num_grads + 1), available, key=needs)
        if most == num_grads and not text:
            return []
        fewer = f"num_grads={most}" if most < num_grads else ""
        found += [" with ".join(filter(None, (fewer, text)))] if most else []
    return found


def _weights(model: nn.Module) -> dict[str, int]:
    sizes = [(tensor.numel(), tensor.requires_grad) for tensor in model.parameters()]
    return {"all": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


def _gradient_seconds(task: Task, model: nn.Module, layout: ParameterLayout, per_sample: bool = False) -> float:
    """Seconds per row, from a few real ones: the best of three times, of which the first is slower."""
    stream = passes(TaskBatches(task, layout.device), cycle=True)
    batch = next(stream)
    count, batches = (min(num_samples(batch, 0), 64), [batch]) if per_sample else (3, stream)
    options: dict[str, Any] = {"params": list(layout.names), "per_sample": per_sample, "progress": False}
    collect = partial(collect_gradients, model, task.scalar_loss, batches, count, **options)
    return min(timeit.repeat(collect, number=1, repeat=3)) / count


def duration(seconds: float) -> str:
    """Seconds as a text with a unit."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"

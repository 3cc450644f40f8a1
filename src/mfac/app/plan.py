"""`mfac plan`: the memory and time of a run, estimated before anything large is allocated."""

import inspect
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from mfac.app.runs.training import CLASSES
from mfac.app.tasks import Task
from mfac.gradients import collect_gradients
from mfac.gradients.batches import move, num_samples, passes
from mfac.gradients.model_state import evaluation, seeded
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout
from mfac.memory import available_memory, gib, parse_bytes
from mfac.pages import DISK_PIECE, WIDE_PIECE, block_runs
from mfac.parameter_window import row_dtype
from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.options import PruningOptions
from mfac.pruning.prune import prune
from mfac.pruning.row_fisher import COPIES
from mfac.pruning.schedules import geometric_schedule
from mfac.pruning.step import NUM_GRADS, ROWS_PER_BLOCK_SIZE, RowMethod, Step
from mfac.pruning.weights import MaskedWeights, Names, choose_targets
from mfac.windows.storage import Window, as_kind
from mfac.windows.topk import TopK

DEFAULTS, PAPER_DAMPING = PruningOptions(), 1e-5
SUMMED_AT_ONCE, VECTORS = 32, 6  # rows that wait to be added to blocks; float64 vectors of a pruning step
SMALLER: tuple[Window, ...] = (torch.bfloat16, torch.int8, TopK())
SAMPLE_BLOCK, FACTORS = 192, 4  # the size of a sampled block, and such products and factors of a block in a step
MOST_ROWS, SAMPLE = 512, 1 << 22  # gradients, and numbers of G, in a sample of pruning
WINDOW_ROWS, WINDOW_SAMPLE = 128, 1 << 24  # and of the optimizer: 64 MiB, larger than any cache


@dataclass(frozen=True)
class Plan:
    """Estimates for a run of a kind ("prune" or "train") with some settings.

    `memory` is {item: bytes} besides the model; `available` is None if unknown; `on_disk` describes rows in a file;
    `seconds` has "gradients", "algebra" and, for pruning, "losses"; `remedies` are settings that fit.
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
    remedies: list[str]

    @property
    def fits(self) -> bool:
        return self.available is None or sum(self.memory.values()) <= self.available

    def as_dict(self) -> dict[str, Any]:
        memory = {**self.memory, "total": sum(self.memory.values())}
        seconds = {**self.seconds, "total": sum(self.seconds.values())}
        return {**vars(self), "memory": memory, "seconds": seconds, "fits": self.fits}

    def text(self) -> str:
        found = self.as_dict()
        settings = ", ".join(f"{key} {'none' if value is None else value}" for key, value in self.settings.items())
        memory = {name: gib(size) for name, size in found["memory"].items()}
        memory["available"] = "unknown" if self.available is None else gib(self.available)
        if self.on_disk:
            memory["G on disk, in pages"] = f"{gib(self.on_disk['bytes'])}, {self.on_disk['pages']:,}"
        time_title = f"time, from {self.gradient_seconds * 1e3:.3g} ms per gradient and short samples of the algebra"
        ways = "; ".join(self.remedies) or "only a larger machine, for any number of gradients and block size"
        sections: dict[str, dict[str, str]] = {
            f"{'Pruning' if self.kind == 'prune' else 'Training'} {self.name}: {settings}": {},
            "weights": {name: f"{count:,}" for name, count in self.weights.items()},
            "memory, besides the model": memory,
            time_title: {name: duration(value) for name, value in found["seconds"].items()},
            "It fits." if self.fits else f"It does not fit. What would: {ways}.": {},
        }
        lines = {title: [f"  {key:<42}{value:>14}" for key, value in rows.items()] for title, rows in sections.items()}
        return "\n\n".join("\n".join([title, *rows]) for title, rows in lines.items())


@seeded(0)
def plan_pruning(
    task: Task,
    device: torch.device | str | None = None,
    num_grads: Annotated[int | None, "gradients of a recomputation or in the window; none: as many as it takes"] = None,
    block_size: int | str | None = DEFAULTS.block_size,
    recomputations: int = DEFAULTS.recomputations,
    sparsity: Annotated[float, "fraction of weights to remove"] = 0.9,
    targets: Names = None,
    ignore: Names = None,
    per_sample: bool = DEFAULTS.per_sample,
    on_disk: Annotated[bool, "keep the gradients on disk (--rows-dir)"] = False,
    memory: int | str | None = None,
) -> Plan:
    """The memory and time of `mfac.prune` with these options."""
    PruningOptions(num_grads=num_grads, block_size=block_size, recomputations=recomputations)
    if not 0 < sparsity < 1:
        raise ValueError(f"sparsity must be between 0 and 1, not {sparsity!r}")
    settings: dict[str, Any] = {
        "num_grads": num_grads, "block_size": block_size, "recomputations": recomputations, "sparsity": sparsity,
        "per_sample": per_sample, "on_disk": on_disk,
    }  # fmt: skip
    model = task.model().to(device)
    layout = ParameterLayout(model, list(choose_targets(model, targets, ignore)))
    row, loss, norm = _time_gradients(task, model, layout, per_sample)
    kept = [1.0, *(1 - s for s in geometric_schedule(0.0, sparsity, recomputations)[:-1])]
    found = _by_output if isinstance(block_size, str) else _by_blocks
    passes, algebra, needed, disk, others = found(task, model, layout, settings, kept, norm, parse_bytes(memory))
    seconds = {
        "gradients": recomputations * settings["num_grads"] * passes * row,
        "algebra": algebra,
        "losses": (recomputations + 1) * DEFAULTS.loss_batches * loss,
    }
    weights, available = {**_weights(model), "prunable": layout.dim}, available_memory(layout.device)
    return Plan("prune", task.name, settings, weights, needed, available, disk, seconds, row, others)


Parts = tuple[int, float, dict[str, int], dict[str, int], list[str]]  # passes, algebra, memory, disk, remedies


def _by_blocks(
    task: Task, model: nn.Module, layout: ParameterLayout, settings: Any, kept: list[float], norm: float, _: int | None
) -> Parts:
    m, B, on_disk = settings["num_grads"] or NUM_GRADS, settings["block_size"], settings["on_disk"]
    settings["num_grads"] = m
    constant, slope = _recomputation_seconds(layout, m, B, on_disk, norm)
    disk = {"bytes": m * layout.dim * layout.dtype.itemsize, "pages": -(-layout.dim // max(1, DISK_PIECE // m))}
    needed = partial(pruning_memory, layout.sizes, layout.dtype)
    ways = {"": (B, on_disk)}
    ways |= {} if on_disk else {f"rows on disk (--rows-dir, {gib(disk['bytes'])})": (B, True)}
    ways |= {f"block_size={size}": (size, on_disk) for size in (128, 32) if (B or layout.dim) > size}
    others = remedies(needed, available_memory(layout.device), m, ways)
    return 1, sum(constant + slope * part * layout.dim for part in kept), needed(m, B, on_disk), disk, others


def _by_output(
    task: Task, model: nn.Module, layout: ParameterLayout, settings: Any, kept: list[float], _: float, room: int | None
) -> Parts:
    """Outputs are measured in groups whose matrices fit, so that everything does."""
    weights = MaskedWeights(model, dict(zip(layout.names, layout.tensors, strict=True)))
    options = PruningOptions(num_grads=settings["num_grads"], fisher="empirical")
    start = Step(0, weights, weights.layout(), BatchStream(task.train_batches()))
    settings["num_grads"] = RowMethod(task.loss, options, Ranks()).num_batches(start)
    shapes = [weight.by_output(weight.tensor).shape for weight in weights.layers.values()]
    sums = sum(8 * COPIES * outputs * inputs**2 for outputs, inputs in shapes)
    room = room or max(1, (available_memory(layout.device) or 2 * sums) // 2)
    passes = settings["passes"] = 1 if sums <= room else 2 * -(-sums // room)  # for scores, and again for the removal
    began, sample = time.perf_counter(), torch.eye(SAMPLE_BLOCK, dtype=torch.float64).expand(4, -1, -1)
    torch.linalg.cholesky(sample @ sample)
    each = (time.perf_counter() - began) / len(sample) / SAMPLE_BLOCK**3  # the same products and factors as a block
    cubes = sum(outputs * (part * inputs) ** 3 for outputs, inputs in shapes for part in kept)
    memory = {"sums and factors of the blocks": min(sums, room), "vectors": VECTORS * 8 * layout.dim}
    return passes, FACTORS * each * cubes, memory, {}, []


@seeded(0)
def plan_training(
    task: Task,
    device: torch.device | str | None = None,
    optimizer: Annotated[str, "whose window is planned"] = "full-matrix-adam",
    num_grads: int | None = None,
    window: Window | None = None,
    momentum: Annotated[float, "momentum of mfac"] = 0.0,
    steps: Annotated[int, "steps of the optimizer"] = 1000,
) -> Plan:
    """The memory and time of training with an optimizer that has a window."""
    kind, model = CLASSES[optimizer][0], task.model().to(device)
    m = num_grads or inspect.signature(kind).parameters["num_grads"].default
    layout = ParameterLayout(model, [name for name, tensor in model.named_parameters() if tensor.requires_grad])
    window, vector = window or row_dtype(layout), layout.dim * row_dtype(layout).itemsize
    settings = {"optimizer": optimizer, "num_grads": m, "window": as_kind(window).name, "steps": steps}
    more = {"momentum": momentum} if optimizer == "mfac" else {}

    def needed(num_grads: int, window: Window) -> dict[str, int]:
        rows = as_kind(window).bytes(num_grads, layout.dim)
        rest = kind.memory_needed(model.parameters(), num_grads, window=window, **more) - rows
        return {"window G": rows, "m x m matrices, state": rest, "gradient, row and step": 3 * vector}

    row, _, _ = _time_gradients(task, model, layout, per_sample=False)
    seconds = {"gradients": steps * row, "algebra": steps * _step_seconds(kind, layout, m, window)}
    memory, available = needed(m, window), available_memory(layout.device)
    smaller = [kind for kind in SMALLER if needed(m, kind)["window G"] < memory["window G"]]
    ways = {"": (window,)} | {f"window={as_kind(kind).name}": (kind,) for kind in smaller}
    others = remedies(needed, available, m, ways)
    return Plan("train", task.name, settings | more, _weights(model), memory, available, {}, seconds, row, others)


def pruning_memory(
    sizes: Sequence[int], dtype: torch.dtype, num_grads: int, block_size: int | None, on_disk: bool
) -> dict[str, int]:
    """{item: bytes} of one recomputation of `mfac.prune` over tensors of these sizes."""
    m, dim = num_grads, sum(sizes)
    runs = block_runs(dim, block_size, None if block_size is None else sizes)
    squares = 8 * sum(run.count * min(run.length, m) ** 2 for run in runs)
    found: dict[str, int] = {}
    if _sums_up(m, block_size, on_disk):
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


def _sums_up(num_grads: int, block_size: int | None, on_disk: bool) -> bool:
    """Whether `mfac.prune` sums gradients into blocks as they come, since rows would take more memory."""
    return not on_disk and block_size is not None and num_grads > ROWS_PER_BLOCK_SIZE * block_size


def _weights(model: nn.Module) -> dict[str, int]:
    sizes = [(tensor.numel(), tensor.requires_grad) for tensor in model.parameters()]
    return {"all": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}


def _time_gradients(task: Task, model: nn.Module, layout: ParameterLayout, per_sample: bool) -> list[float]:
    """Seconds per row and per loss of a batch, and the mean norm of rows."""
    stream = passes(task.train_batches(), cycle=True)
    batch = next(stream)
    with evaluation(model), torch.no_grad():
        moved, start = move(batch, layout.device), time.perf_counter()
        float(task.scalar_loss(model, moved))
        loss = time.perf_counter() - start
    count, row = min(num_samples(batch, 0), 64) if per_sample else 3, float("inf")
    for _ in range(3):  # the first is slower
        start, taken = time.perf_counter(), [batch] if per_sample else stream
        options: dict[str, Any] = {"params": list(layout.names), "per_sample": per_sample, "progress": False}
        G: Any = collect_gradients(model, task.loss, taken, count, **options)
        row = min(row, (time.perf_counter() - start) / count)
    return [row, loss, float(torch.linalg.vector_norm(G, dim=1, dtype=torch.float64).mean())]


def _fitted(sample: Callable[[int], float], low: int, high: int) -> tuple[float, float]:
    """(constant, slope) of the seconds by the number of columns."""
    fast, slow = sample(low), sample(high)
    slope = max(0.0, (slow - fast) / max(1, high - low)) or slow / high
    return max(0.0, slow - slope * high), slope


def _recomputation_seconds(
    layout: ParameterLayout, num_grads: int, block_size: int | None, on_disk: bool, norm: float
) -> tuple[float, float]:
    """(constant, per remaining weight) of a recomputation without its gradients, from `mfac.prune` on small tensors."""
    m, B = min(num_grads, MOST_ROWS), block_size
    most = min(layout.dim, max(B or 64, SAMPLE // m))
    most -= most % B if B and most > B else 0

    def sample(width: int) -> float:
        scale = norm / (width if B is None else layout.dim) ** 0.5  # rows as long as the real ones decide the precision
        rows = (scale * torch.randn(m, 1, width)).to(layout.device, layout.dtype)
        model = nn.Linear(width, 1, bias=False, device=layout.device, dtype=layout.dtype)
        shared: dict[str, Any] = {"recomputations": 1, "loss_batches": 1, "progress": False, "damping": PAPER_DAMPING}
        found = prune(model, lambda model, row: model(row).sum(), rows, 0.1, num_grads=m, block_size=B, **shared)
        record = found.history[0]
        return record.seconds - (0.0 if _sums_up(num_grads, B, on_disk) else record.gradient_seconds)

    constant, slope = _fitted(sample, min(B or 64, most), most)
    more = num_grads / m  # blocks: one product of m x B numbers each; the full matrix: m x m per column, and a factor
    return (constant * more, slope * more) if B is not None else (constant * more**3, slope * more**2)


def _step_seconds(kind: Any, layout: ParameterLayout, num_grads: int, window: Window) -> float:
    """The optimizer's part of a step with a full window: two passes over it, and m x m algebra."""
    m = min(num_grads, WINDOW_ROWS)

    def sample(width: int) -> float:
        weight, times = nn.Parameter(torch.zeros(width, device=layout.device, dtype=row_dtype(layout))), []
        optimizer = kind([weight], 0.0, m, damping=1.0, window=window)
        for _ in range(m + 3):
            weight.grad = torch.randn_like(weight)
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return min(times[m:])

    most = min(layout.dim, WINDOW_SAMPLE // m)
    constant, slope = _fitted(sample, min(64, most), most)
    return constant * (num_grads / m) ** 2 + slope * layout.dim * num_grads / m


def duration(seconds: float) -> str:
    """Seconds as a text with a unit."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"

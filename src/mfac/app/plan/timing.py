"""Seconds on this machine, from short samples of the real work: a few gradients, and algebra on a few columns."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.plan.memory import SUMMED_AT_ONCE, PruningMemory, WindowMemory
from mfac.fisher_blocks import FisherBlocks
from mfac.gradients import collect_gradients
from mfac.gradients.batches import Batch, move, num_samples, passes
from mfac.gradients.losses import LossFn
from mfac.gradients.model_state import evaluation
from mfac.pruning.curvature import FisherCurvature
from mfac.sliding import LEAST_REFRESH, SlidingInverse
from mfac.windows import as_kind

SAMPLE_ROWS = 512  # more gradients than this are timed at this many, and scaled
SAMPLE = 1 << 22  # numbers of G in a sample for pruning: 16 MiB
ENOUGH, MOST_ROWS, MOST_NUMBERS = 0.2, 64, 1 << 23  # seconds of gradients that are timed, and how much at most
WINDOW_SAMPLE = 1 << 24  # and for the window, whose passes are as fast as memory is: 64 MiB, beyond any cache


@dataclass(frozen=True)
class GradientTime:
    """Seconds of one row and of the loss of one batch, and how large the rows are."""

    row: float
    loss: float
    norm: float


def time_gradients(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], params: list[str], per_sample: bool, rows: int = 3
) -> GradientTime:
    """From `rows` real gradients (with `per_sample`, those of one batch), after one that warms up.

    Raises:
        ValueError: there are no batches.
    """
    stream = passes(batches, cycle=True)
    batch = next(stream)
    count = min(num_samples(batch, 0), 64) if per_sample else rows

    def collect(number: int) -> Tensor:
        taken: Iterable[Batch] = [batch] if per_sample else stream
        rows = collect_gradients(model, loss_fn, taken, number, params=params, per_sample=per_sample, progress=False)
        assert isinstance(rows, Tensor)
        return rows

    collect(1)
    row, G = _timed_rows(collect, count)
    more = min(MOST_ROWS, MOST_NUMBERS // G.shape[1], int(ENOUGH / row) + 1)
    if more > count and not per_sample:  # it was so short that the start counted
        row, G = _timed_rows(collect, more)
    devices = {parameter.device for parameter in model.parameters()}
    batch = move(batch, *devices) if len(devices) == 1 else batch
    with evaluation(model), torch.no_grad():
        loss = _best(lambda: float(loss_fn(model, batch)), 2)
    return GradientTime(row, loss, float(torch.linalg.vector_norm(G, dim=1, dtype=torch.float64).mean()))


def _timed_rows(collect: Callable[[int], Tensor], count: int) -> tuple[float, Tensor]:
    start = time.perf_counter()
    G = collect(count)
    return (time.perf_counter() - start) / count, G


def pruning_algebra(memory: PruningMemory, damping: float, norm: float, device: torch.device) -> Callable[[int], float]:
    """Seconds of one recomputation without its gradients, by the number of weights that are left.

    Measured on samples of two widths, each of random rows as long as the real ones; the rest is a straight line.
    """
    m, d = min(memory.num_grads, SAMPLE_ROWS), memory.dim
    widths = _widths(m, d, memory.block_size)
    seconds = [_time_recomputation(memory, m, width, damping, norm, device) for width in widths]
    slope = max(0.0, (seconds[-1] - seconds[0]) / max(1, widths[-1] - widths[0])) if len(widths) > 1 else 0.0
    if not slope:
        slope = seconds[-1] / widths[-1]
    fixed = max(0.0, seconds[-1] - slope * widths[-1])
    more = memory.num_grads / m
    # Blocks: one product of m x B numbers a block. The full matrix: m x m a column, and a factorisation.
    grows, constant = (more, more) if memory.block_size is not None else (more**2, more**3)
    return lambda left: fixed * constant + slope * grows * left


def window_step(memory: WindowMemory, device: torch.device) -> float:
    """Seconds of the optimizer's part of a step, the window being full: two passes over it, and m x m algebra."""
    m, d = min(memory.num_grads, SAMPLE_ROWS), memory.dim
    width = min(d, max(1, WINDOW_SAMPLE // m))
    rows = as_kind(memory.window).build(m, width, device)
    generator = torch.Generator().manual_seed(0)
    for k in range(m):
        rows.write(k, rows.encode(torch.randn(width, generator=generator).to(device)))
    g, a = torch.ones(width, device=device), torch.ones(m, dtype=torch.float64, device=device)

    def passes() -> None:
        rows.project(m, g, torch.float32)
        rows.combine(a, torch.float32)
        _wait(device)

    def store() -> None:
        rows.write(0, rows.encode(g))
        _wait(device)

    per_number = _best(passes, 3) / (m * width)
    more = memory.num_grads / m
    return per_number * memory.num_grads * d + _best(store, 3) * d / width + _sliding(m, device) * more**2


def _sliding(m: int, device: torch.device) -> float:
    """Seconds of a replacement in the m x m inverse, and the share of the Cholesky that comes once in m of them."""
    inverse = SlidingInverse(m, device)
    K = torch.eye(m, dtype=torch.float64, device=device)
    inverse.restore(K, m, 1.0, None, 0, False)
    start = time.perf_counter()
    inverse.settle()
    _wait(device)
    anew = time.perf_counter() - start

    def replace() -> None:
        inverse.replace(0, K[0].clone(), 1.0)
        inverse.column(0)

    return _best(replace, 3) + anew / max(m, LEAST_REFRESH)


def _time_recomputation(
    memory: PruningMemory, m: int, width: int, damping: float, norm: float, device: torch.device
) -> float:
    generator = torch.Generator().manual_seed(0)
    # As long as the real rows: how long they are decides in which precision products are made.
    scale = norm / (width if memory.block_size is None else memory.dim) ** 0.5
    G = (torch.randn(m, width, generator=generator) * scale).to(device, memory.dtype)
    theta = torch.randn(width, generator=generator, dtype=torch.float64).to(device)
    removed = (torch.rand(width, generator=generator) < 0.1).to(device)

    def recompute() -> None:
        rows: Any = G
        if memory.summed:
            assert memory.block_size is not None
            rows = FisherBlocks(width, memory.block_size, [width], device=device)
            for part in G.split(SUMMED_AT_ONCE):
                rows.add(part)
        curvature = FisherCurvature(rows, damping, memory.block_size, [width], device)
        curvature.scores(theta)
        curvature.remove(theta, removed, "joint")
        _wait(device)

    return _best(recompute, 2)


def _widths(m: int, d: int, block_size: int | None) -> list[int]:
    """Columns of a small and of a large sample, in whole blocks; only one where all of G is no larger."""
    most = min(d, max(block_size or 64, SAMPLE // m))
    if block_size is not None and most > block_size:
        most -= most % block_size
    half = most // 2
    if block_size is not None:
        half -= half % block_size
    return [most] if most == d or not half else [half, most]


def _best(call: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)

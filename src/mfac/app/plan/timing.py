"""Times on this machine, from short samples of the real work: a few gradients, and the library on a few columns."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.plan.memory import PruningMemory, WindowMemory
from mfac.gradients import collect_gradients
from mfac.gradients.batches import move, num_samples, passes
from mfac.gradients.model_state import evaluation
from mfac.optimizer import MFAC
from mfac.pruning.prune import prune

MOST_ROWS = 512  # gradients in a sample for pruning
SAMPLE = 1 << 22  # numbers of G in it
WINDOW_ROWS, WINDOW_SAMPLE = 128, 1 << 24  # and in a sample for the optimizer: 64 MiB, beyond any cache
ENOUGH, MOST_TIMED, MOST_NUMBERS = 0.2, 64, 1 << 23  # seconds, rows and numbers of gradients that are timed


def time_gradients(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    params: list[str],
    per_sample: bool,
) -> tuple[float, float, float]:
    """Seconds per row and per loss of a batch, and the mean norm of rows; after a row to warm up.

    Raises:
        ValueError: there are no batches.
    """
    stream = passes(batches, cycle=True)
    batch = next(stream)

    def collect(count: int) -> tuple[float, Tensor]:
        taken = [batch] if per_sample else stream
        start = time.perf_counter()
        G: Any = collect_gradients(model, loss_fn, taken, count, params=params, per_sample=per_sample, progress=False)
        return (time.perf_counter() - start) / count, G

    collect(1)
    count = min(num_samples(batch, 0), 64) if per_sample else 3
    row, G = collect(count)
    more = min(MOST_TIMED, MOST_NUMBERS // G.shape[1], int(ENOUGH / row) + 1)
    if more > count and not per_sample:
        row, G = collect(more)
    devices = {parameter.device for parameter in model.parameters()}
    batch = move(batch, *devices) if len(devices) == 1 else batch
    with evaluation(model), torch.no_grad():
        start = time.perf_counter()
        float(loss_fn(model, batch))
        loss = time.perf_counter() - start
    return row, loss, float(torch.linalg.vector_norm(G, dim=1, dtype=torch.float64).mean())


def pruning_algebra(memory: PruningMemory, damping: float, norm: float, device: torch.device) -> Callable[[int], float]:
    """{remaining weights: seconds of a recomputation without its gradients}, from `mfac.prune` on two small tensors."""
    m, B = min(memory.num_grads, MOST_ROWS), memory.block_size
    most = min(memory.dim, max(B or 64, SAMPLE // m))
    widths = [width - width % B if B and width > B else width for width in (max(1, most // 2), most)]
    (low, high), (fast, slow) = widths, (_prune_sample(memory, m, width, damping, norm, device) for width in widths)
    slope = max(0.0, (slow - fast) / max(1, high - low)) or slow / high
    more = memory.num_grads / m
    # Blocks: one product of m x B numbers per block. The full matrix: m x m per column, and a factorization.
    linear, constant = (more, more) if B is not None else (more**2, more**3)
    return lambda left: max(0.0, slow - slope * high) * constant + slope * linear * left


def _prune_sample(
    memory: PruningMemory, m: int, width: int, damping: float, norm: float, device: torch.device
) -> float:
    """Seconds for a tensor whose gradients are random rows, as long as the real ones: that decides the precision."""
    generator = torch.Generator().manual_seed(0)
    scale = norm / (width if memory.block_size is None else memory.dim) ** 0.5
    rows = (torch.randn(m, 1, width, generator=generator) * scale).to(device, memory.dtype)
    model = nn.Linear(width, 1, bias=False, device=device, dtype=memory.dtype)
    record = prune(
        model, _product, rows, 0.1, num_grads=m, block_size=memory.block_size, damping=damping, recomputations=1,
        loss_batches=1, seed=0, progress=False,
    ).history[0]  # fmt: skip
    return record.seconds - (0.0 if memory.is_summed else record.gradient_seconds)


def _product(model: nn.Module, row: Tensor) -> Tensor:
    return model(row).sum()


def window_step(memory: WindowMemory, device: torch.device) -> float:
    """Seconds of the optimizer's part of a step with a full window: two passes over it, and m x m algebra."""
    m = min(memory.num_grads, WINDOW_ROWS)
    width = min(memory.dim, max(1, WINDOW_SAMPLE // m))
    small = _step_sample(memory, m, min(64, width), device)
    large = _step_sample(memory, m, width, device)
    more = memory.num_grads / m
    return small * more**2 + max(0.0, large - small) * more * memory.dim / width


def _step_sample(memory: WindowMemory, m: int, width: int, device: torch.device) -> float:
    weight = nn.Parameter(torch.zeros(width, device=device, dtype=memory.computed))
    optimizer = MFAC([weight], 0.0, m, 1.0, window=memory.window)
    best = float("inf")
    for k in range(m + 3):
        weight.grad = torch.randn_like(weight)
        start = time.perf_counter()
        optimizer.step()
        best = min(best, time.perf_counter() - start) if k >= m else best
    return best

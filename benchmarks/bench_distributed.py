"""Steps on one to four processes: strong scaling (one window, cut) and weak scaling (as many columns for each).

    python benchmarks/bench_distributed.py             # 2.4 million weights, m = 256: 4 GiB, some minutes
    python benchmarks/bench_distributed.py --small     # a tenth of it; nothing is saved

Every process has one thread. "shards" is the operator on columns of its own (FSDP2: a sum of m numbers a step),
"replicas" the optimizer whose weights are whole everywhere (DDP: the step is gathered besides). A time is that of the
slowest process, and the best of a dozen; the collectives are timed by themselves too. On two cores two processes can
be faster than one, and as a pass over the window is bound by memory, not twice as fast; three and four processes take
turns, and show what the collectives cost and that memory falls, not that time does.
"""

import argparse
import os
import tempfile
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mfac
from mfac.inverse_fisher import ranks_of
from timing import fill, save

SIZES, ROUNDS, DAMPING = (1, 2, 3, 4), 12, 1e-3


def gradient(dim, turn):
    draw = torch.Generator().manual_seed(turn + 8)
    return torch.randn(dim, generator=draw) / dim**0.5


def few(dim):
    return [gradient(dim, -1 - turn) for turn in range(8)]


def best_time(ranks, action):
    """The best over some rounds of the time that the slowest process takes."""
    best = float("inf")
    for turn in range(ROUNDS):
        prepared = action(turn)
        if ranks.size > 1:
            dist.barrier()
        began = time.perf_counter()
        prepared()
        elapsed = torch.tensor(time.perf_counter() - began)
        if ranks.size > 1:
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        best = min(best, float(elapsed))
    return best


def shards(ranks, dim, m):
    """The operator on this process's columns."""
    op = mfac.DynamicInverseFisher(m, dim // ranks.size, DAMPING, normalize="full", process_group=ranks.group)
    fill(op, few(dim // ranks.size))

    def prepare(turn):
        return partial(op.update_and_apply, gradient(dim // ranks.size, turn))

    return best_time(ranks, prepare), op


def replicas(ranks, dim, m):
    """The whole optimizer, with weights and gradients that every process has."""
    weights = torch.nn.Parameter(torch.zeros(dim))
    optimizer = mfac.MFAC([weights], 1e-3, m, DAMPING, process_group=ranks.group)
    op = optimizer._window.operator
    fill(op, few(op.shape[0]))

    def prepare(turn):
        weights.grad = gradient(dim, turn)
        return optimizer.step

    return best_time(ranks, prepare), op


def work(rank, size, store, dim, m, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(minutes=5), size, rank)
    ranks, numbers, piece = ranks_of(dist.group.WORLD), torch.zeros(m, dtype=torch.float64), torch.zeros(dim // size)
    figures = {
        "sum_of_m_s": best_time(ranks, lambda _: lambda: ranks.sum_(numbers)),
        "gathering_of_d_s": best_time(ranks, lambda _: lambda: ranks.gather(piece, [len(piece)] * size)),
    }
    for way in (shards, replicas):
        seconds, op = way(ranks, dim, m)
        figures |= {f"{way.__name__}_step_s": seconds, "rows_bytes_a_rank": op.rows.nbytes}
        del op
    if rank == 0:
        queue.put(figures)
    dist.barrier()
    dist.destroy_process_group()


def measure(size, dim, m):
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (size, os.path.join(folder, "store"), dim, m, queue), nprocs=size)
    return queue.get()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tenth of the weights; nothing is saved")
    small = parser.parse_args().small
    where = {"folder": None} if small else {}
    save("distributed", "python benchmarks/bench_distributed.py", rows(small), **where)


def rows(small):
    dim, m = (240_000, 64) if small else (2_400_000, 256)
    for kind in ("strong", "weak"):
        first = None
        for size in SIZES:
            whole = dim if kind == "strong" else dim // 4 * size
            figures = measure(size, whole, m)
            first = first or figures
            ratios = {
                f"{way}_time_of_one": figures[f"{way}_step_s"] / first[f"{way}_step_s"]
                for way in ("shards", "replicas")
            }
            yield {"what": kind, "ranks": size, "d": whole, "m": m, **figures, **ratios}


if __name__ == "__main__":
    main()

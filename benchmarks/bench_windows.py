"""Storages of the window: bytes and the time of a step as ratios to float32, and single passes, made in three ways.

    python benchmarks/bench_windows.py                 # 270,000 weights and those of BERT-tiny: 7 GiB, some minutes
    python benchmarks/bench_windows.py --small         # 270,000 weights only: 3 GiB; nothing is saved
    OMP_NUM_THREADS=1 python benchmarks/bench_windows.py --passes       # compiled C, torch by tiles, torch.compile

With one thread the clock is the processor time of the process, which a busy machine disturbs least; with more it is
wall-clock time. "Not compiled" is what a machine without a C compiler gets.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mfac
from mfac.windows.storage import as_kind, window_bytes
from timing import fill, save, timed

RESNET20, BERT_TINY, M = 270_000, 4_386_178, 1024
STORAGES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16, not compiled": torch.bfloat16,
    "float16": torch.float16,
    "float16, not compiled": torch.float16,
    "int8": torch.int8,
    "int8, not compiled": torch.int8,
    "int8, blocks of 1024": mfac.Int8(block=1024),
    "int8, stochastic": mfac.Int8(stochastic=True),
    "top-k 1 %": mfac.TopK(0.01),
    "top-k 1 % in float32": mfac.TopK(0.01, dtype=torch.float32),
}
LARGE = ("bfloat16", "bfloat16, not compiled", "int8", "int8, not compiled", "top-k 1 %")
PASSES = {
    "bfloat16": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, torch.float32),
    "int8": (torch.int8, torch.float32),
    "float32 in float64": (torch.float32, torch.float64),
}


class Gradients:
    """Rows of independent directions and norm 1, as many as are wanted, from one draw."""

    def __init__(self, dim):
        base = torch.randn(dim, generator=torch.Generator().manual_seed(0))
        self.base, self.turn = base / base.norm(), 0

    def next(self):
        self.turn += 1
        return self.base.roll(9973 * self.turn)


def filled(window, m, dim):
    """An operator whose window is full, and what gives it gradients."""
    op, gradients = mfac.DynamicInverseFisher(m, dim, 1e-3, normalize="full", window=window), Gradients(dim)
    fill(op, [gradients.next() for _ in range(8)])
    op.update_and_apply(gradients.next())  # makes the inverse
    return op, gradients


def best_times(operators, rounds=12):
    """The best time of a step of each; they take turns."""
    best = dict.fromkeys(operators, float("inf"))
    gc.collect()
    for _ in range(rounds):
        for name, (op, gradients) in operators.items():
            g = gradients.next()
            mfac.native.allow("not compiled" not in name)
            best[name] = min(best[name], timed(op.update_and_apply, g))
    return best


def row_of(name, m, dim, seconds, whole):
    needed, dense = (window_bytes(m, dim, kind) - 32 * m**2 for kind in (STORAGES[name], torch.float32))
    row = {"what": "step", "d": dim, "m": m, "storage": name, "bytes": needed, "bytes_of_float32": needed / dense}
    return {**row, "step_s": seconds, "time_of_float32": seconds / whole if whole else None}


def side_by_side(dim, m, names):
    operators = {name: filled(STORAGES[name], m, dim) for name in ("float32", *names)}
    times = best_times(operators)
    return [row_of(name, m, dim, seconds, times["float32"]) for name, seconds in times.items()]


def alone(dim, m, name):
    """Where float32 does not fit beside it, or at all."""
    return row_of(name, m, dim, best_times({name: filled(STORAGES[name], m, dim)}, 4)[name], None)


def passes(name, m, dim, rounds=7):
    """Milliseconds of G x and Gᵀa: compiled from C, by torch a tile at a time, and by torch.compile over all rows."""
    stored, real = PASSES[name]
    rows, gradients = as_kind(stored).build(m, dim, torch.device("cpu")), Gradients(dim)
    for k in range(m):
        rows.write(k, rows.encode(gradients.next()))
    state = rows.state()
    G, x, a = state if torch.is_tensor(state) else state["codes"], gradients.next(), torch.ones(m, dtype=torch.float64)
    xs, weights = x.to(real), a.to(real)[:, None]
    project, combine = (
        torch.compile(f) for f in (lambda: (G.to(real) * xs).sum(1), lambda: (G.to(real) * weights).sum(0))
    )
    began = time.perf_counter()
    project()
    row = {"what": "pass", "d": dim, "m": m, "storage": name, "torch_compile_starts_s": time.perf_counter() - began}
    ways = {"c": (True, None), "torch": (False, None), "torch_compile": (False, (project, combine))}
    for way, (compiled, functions) in ways.items():
        mfac.native.allow(compiled)
        pair = functions or (lambda: rows.project(m, x, real), lambda: rows.combine(a, real))
        for product, function in zip(("project", "combine"), pair, strict=True):
            row[f"{way}_{product}_ms"] = 1e3 * min(timed(function) for _ in range(rounds))
    mfac.native.allow(True)
    return row


def training_step(name, m=M):
    """A whole step of BERT-tiny with a window of m gradients, into an empty one: that it fits and moves."""
    sys.path.insert(0, str(Path(__file__).parent.parent))  # the folder of experiments
    from experiments.models.bert import bert_tiny

    torch.manual_seed(0)
    model = bert_tiny("sst2")
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = mfac.MFAC(model.parameters(), 0.5, m, 0.05, normalize="sum", window=STORAGES[name])
    ids, labels = torch.randint(0, 30_522, (8, 32)), torch.randint(0, 2, (8,))
    nn.functional.cross_entropy(model(ids).logits, labels).backward()
    elapsed = timed(optimizer.step)
    moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    return {
        "what": "first step of BERT-tiny", "d": len(before), "m": m, "storage": name,
        "bytes": mfac.MFAC.memory_needed(model.parameters(), m, window=STORAGES[name]), "step_s": elapsed,
        "weights_moved": int(moved.count_nonzero()),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="270,000 weights only; nothing is saved")
    parser.add_argument("--passes", action="store_true", help="single passes by each way to make them")
    arguments = parser.parse_args()
    if arguments.passes:
        rows = (passes(name, m, 1_000_000) for m in (64, 256) for name in PASSES)
        save("window_passes", "OMP_NUM_THREADS=1 python benchmarks/bench_windows.py --passes", rows)
    else:
        where = {"folder": None} if arguments.small else {}
        save("windows", "python benchmarks/bench_windows.py", steps(arguments.small), **where)


def steps(small):
    yield from side_by_side(RESNET20, M, [name for name in STORAGES if name != "float32"])
    for name in () if small else LARGE:  # in pairs: float32 takes 4.2 GiB of the 8 that are meant to be enough
        yield from side_by_side(BERT_TINY, 256, [name])
    for name in () if small else ("int8", "top-k 1 %"):
        yield from (alone(BERT_TINY, M, name), training_step(name))


if __name__ == "__main__":
    main()

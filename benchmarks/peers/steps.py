"""One step of a sliding window: the newest gradient replaces the oldest, and F⁻¹ is applied to it."""

import sys
import time
from itertools import count
from pathlib import Path

import torch

import mfac
from bench_windows import filled
from mfac import reference
from mfac.windows.storage import window_bytes
from peers.cells import best_of, forget_peak, peak, resident
from peers.inverses import conjugate_gradients
from peers.matrices import DAMPING, GGT_EPS, error, fill_rows, load_truth, rows

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a script, the folder of experiments is not on the path
from experiments.baselines.ggt import ggt_step

SMALLER = {"mfac, int8": torch.int8, "mfac, top-k 1 %": mfac.TopK(0.01)}
NEEDS = {
    "mfac": lambda m, d: window_bytes(m, d, torch.float32),
    **{name: (lambda m, d, kind=kind: window_bytes(m, d, kind) + 80 * d) for name, kind in SMALLER.items()},
    "Algorithms 1 and 2": lambda m, d: 4 * m * d + 20 * m * m,
    "GGT": lambda m, d: 4 * m * d + 40 * m * m,
    "conjugate gradients": lambda m, d: 4 * m * d + 20 * d,
}


def fill_window(op, K=None):
    """Gives an operator all of its rows at once, not by m updates, which would be m passes; the last is the oldest."""
    state = op.state_dict()
    G = state["rows"]  # the window's own memory
    fill_rows(G)
    K = (G @ G.T).double() if K is None else K
    op.load_state_dict(state | {"gram": K, "updates": 2 * len(G) - 1, "num_seen": len(G)})
    return G


def measure(cell, report, folder):
    m, d, method = cell["m"], cell["d"], cell["method"]
    start = resident()
    true = load_truth(folder, m, d)
    make = {"mfac": _ours, "Algorithms 1 and 2": _algorithms, "GGT": _ggt, "conjugate gradients": _iterations}
    step, notes = _compressed(m, d, SMALLER[method]) if method in SMALLER else make[method](m, d, true)
    forget_peak()
    report.ready()
    began = time.perf_counter()
    answer = step()  # row 0 takes its own place again: the matrix is the one that the truth is about
    row = {"step_error": None, "step_s": time.perf_counter() - began}
    exact = None if true is None or method in SMALLER else true.get("ggt" if method == "GGT" else "step")
    if exact is not None:
        row["step_error"] = error(answer, exact)
    row["peak_bytes"] = peak() - start
    report.first({**row, **notes()})
    return {**row, "step_s": best_of(step), **notes()}


def _ours(m, d, true):
    op = mfac.DynamicInverseFisher(m, d, DAMPING)
    G = fill_window(op, None if true is None else true["K"])
    op.update_and_apply(G[-1].clone())  # makes the inverse, which from now on is kept up to date
    turn = count()

    def step():
        return op.update_and_apply(G[next(turn) % m].clone())

    return step, lambda: {"passes": "float64" if op._sensitive else "float32"}


def _compressed(m, d, kind):
    op, gradients = filled(kind, m, d)
    return lambda: op.update_and_apply(gradients.next()), dict


def _algorithms(m, d, true):
    G = rows(m, d)
    GGt = (G @ G.T) if true is None else true["K"].float()
    turn = count()

    def step():
        k = next(turn) % m
        g = G[k].clone()
        p = G @ g
        GGt[k], GGt[:, k] = p, p
        D, B = reference.dynamic_setup(GGt, DAMPING)
        return reference.dynamic_multiply(G, g, D, B, DAMPING)

    return step, dict


def _ggt(m, d, true):
    G, turn = rows(m, d), count()

    def step():
        return ggt_step(G, next(turn) % m, m, GGT_EPS)

    return step, dict


def _iterations(m, d, true):
    G, turn, taken = rows(m, d), count(), []

    def step():
        answer, iterations = conjugate_gradients(G, G[next(turn) % m])
        taken.append(iterations)
        return answer

    return step, lambda: {"iterations": max(taken)}

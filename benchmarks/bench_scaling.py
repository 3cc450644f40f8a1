"""How the cost grows with d, at m = 64: linearly, from a hundred thousand weights to ten million."""

from itertools import cycle

import torch

import mfac
from timing import in_seconds, save, seconds, unit_rows

DAMPING, M = 1e-4, 64  # where unit rows leave all products in float32


def grow(d):
    G, x = unit_rows(M, d), torch.randn(d)
    static = mfac.StaticInverseFisher(G, DAMPING)
    dynamic = mfac.DynamicInverseFisher(M, d, DAMPING)
    for row in G:
        dynamic.update(row)
    lap = cycle(G)  # each row takes its own place again, so that the window never holds one twice
    times = seconds(
        set_up_and_diagonal=lambda: mfac.StaticInverseFisher(G, DAMPING).diagonal(),
        product=lambda: static @ x,
        update_and_apply=lambda: dynamic.update_and_apply(next(lap)),
    )
    per_weight = {f"{name}_ns_a_weight": 1e9 * value / d for name, value in times.items()}
    return {"what": "growth with d", "d": d, "m": M, **in_seconds(times), **per_weight}


def main():
    sizes = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
    save("scaling", "python benchmarks/bench_scaling.py", map(grow, sizes))


if __name__ == "__main__":
    main()

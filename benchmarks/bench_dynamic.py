"""One step of the sliding window: against the two bare passes over it, and against the paper's Algorithms 1 and 2."""

from itertools import count, cycle, starmap

import torch

import mfac
from mfac import reference
from timing import in_seconds, save, seconds

DAMPING = 1e-5


def rows_of(d, noise, seed=0):
    """Unit rows; below a noise of 1 they nearly repeat one another, and the passes are made in float64."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(d, generator=generator) if noise < 1 else torch.zeros(d)
    while True:
        row = common + noise * torch.randn(d, generator=generator)
        yield row / row.norm()


def step(m, d, noise=1.0):
    source = rows_of(d, noise)
    op = mfac.DynamicInverseFisher(m, d, DAMPING)
    G = torch.empty(m, d)
    for k in range(m):
        G[k] = next(source)
        op.update(G[k])
    fresh = torch.stack([next(source) for _ in range(m)])  # a lap, so that the window never holds a row twice
    GGt, c, turn, lap = G @ G.T, torch.randn(m), count(), cycle(fresh)

    def paper():
        k = next(turn) % m
        g = fresh[k]
        G[k] = g
        p = G @ g
        GGt[k], GGt[:, k] = p, p
        D, B = reference.dynamic_setup(GGt, DAMPING)
        reference.dynamic_multiply(G, g, D, B, DAMPING)

    op.update_and_apply(next(lap))
    times = seconds(
        ours=lambda: op.update_and_apply(next(lap)),
        two_passes=lambda: (G @ fresh[0], c @ G),
        paper=paper,
    )
    return {
        "what": "update_and_apply", "d": d, "m": m, "passes": "float64" if op._sensitive else "float32",
        **in_seconds(times),
        "of_two_bare_passes": times["ours"] / times["two_passes"],
        "times_faster_than_algorithms_1_and_2": times["paper"] / times["ours"],
        "gigabytes_a_second_of_the_bare_passes": 2 * 4 * m * d / times["two_passes"] / 1e9,
    }  # fmt: skip


def main():
    sizes = (64, 10_000), (1024, 10_000), (512, 270_000), (1024, 270_000), (512, 270_000, 0.03)
    save("dynamic", "python benchmarks/bench_dynamic.py", starmap(step, sizes))


if __name__ == "__main__":
    main()

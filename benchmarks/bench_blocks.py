"""Static set-up and diagonal in blocks: against the paper's Algorithm 3, run on all blocks at once.

python benchmarks/bench_blocks.py            # writes benchmarks/results/blocks.json
python benchmarks/bench_blocks.py 128 64     # blocks of 128 with 64 gradients, to look at
"""

import sys
from itertools import starmap

import torch

import mfac
from mfac import reference
from timing import in_seconds, save, seconds, shown, unit_rows

DAMPING = 1e-5


def blocks(block_size, m, d=270_000):
    d -= d % block_size
    G = unit_rows(m, d)
    batch = G.unflatten(1, (-1, block_size)).transpose(0, 1).contiguous()

    def paper():
        V, q = reference.static_setup(batch, DAMPING)
        reference.static_diagonal(V, q, DAMPING)

    def read_and_multiply():
        """In the primal or in the dual, whichever matrix is smaller."""
        torch.bmm(batch.mT, batch) if block_size <= m else torch.bmm(batch, batch.mT)

    ours = lambda: mfac.StaticInverseFisher(G, DAMPING, block_size=block_size).diagonal()  # noqa: E731
    times = seconds(ours=ours, read_and_multiply=read_and_multiply, paper=paper)
    return {
        "what": "set-up and diagonal, blocks", "d": d, "m": m, "block_size": block_size,
        **in_seconds(times),
        "times_faster_than_algorithm_3": times["paper"] / times["ours"],
        "of_reading_and_multiplying_once": times["ours"] / times["read_and_multiply"],
    }  # fmt: skip


def main():
    if chosen := [int(argument) for argument in sys.argv[1:]]:
        shown(blocks(*chosen))
    else:
        save("blocks", "python benchmarks/bench_blocks.py", starmap(blocks, ((128, 64), (2048, 400), (128, 1024))))


if __name__ == "__main__":
    main()

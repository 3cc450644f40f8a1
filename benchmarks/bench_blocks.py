"""Static set-up and diagonal in blocks: against the paper's Algorithm 3, run on all blocks at once.

python benchmarks/bench_blocks.py            # writes benchmarks/results/blocks.json
python benchmarks/bench_blocks.py 128 64     # blocks of 128 with 64 gradients, to look at
"""

import sys

from bench_static import measured
from peers.matrices import real_rows
from timing import save, shown, unit_rows


def cases(sizes):
    name, G = real_rows(max(m for _, m in sizes))
    for kind, block_size, m in [(kind, *size) for kind in (name, "norm 1") for size in sizes]:
        row = measured(kind, G[:m] if kind == name else unit_rows(m, 270_000), block_size)
        yield row | {"block_size": block_size, "of_reading_and_multiplying_once": row.pop("of_the_flop_limit")}


if __name__ == "__main__":
    if chosen := tuple(map(int, sys.argv[1:])):
        list(map(shown, cases([chosen])))
    else:
        save("blocks", "python benchmarks/bench_blocks.py", cases([(128, 64), (128, 256), (2048, 512)]))

"""Static set-up and diagonal: against the paper's Algorithm 3, in full and in blocks, and against the flop limit."""

import torch

import mfac
from mfac import reference
from timing import matmul_rate, save, seconds, show

DAMPING = 1e-5


def unit_rows(m, d):
    G = torch.randn(m, d, generator=torch.Generator().manual_seed(0))
    return G / G.norm(dim=1, keepdim=True)


def full(m, d=270_000):
    G = unit_rows(m, d)

    def paper():
        V, q = reference.static_setup(G, DAMPING)
        reference.static_diagonal(V, q, DAMPING)

    times = seconds(
        ours=lambda: mfac.StaticInverseFisher(G, DAMPING).diagonal(),
        ours_float64=lambda: mfac.StaticInverseFisher(G, DAMPING, precision="float64").diagonal(),
        product=lambda: G @ G.T,
        paper=paper,
    )
    # 2 m² d flops, half for the Gram matrix and half for the whitening, are those of one plain product.
    return {
        "what": "set-up and diagonal, full", "d": d, "m": m, **{f"{name}_s": value for name, value in times.items()},
        "times_faster_than_algorithm_3": times["paper"] / times["ours"],
        "of_the_flop_limit": times["ours"] / times["product"],
        "float64_of_the_flop_limit": times["ours_float64"] / times["product"],
        "matmul_gflops": matmul_rate(m, d) / 1e9,
    }  # fmt: skip


def blocks(block_size, m, d=270_000):
    d -= d % block_size
    G = unit_rows(m, d)
    batch = G.unflatten(1, (-1, block_size)).transpose(0, 1).contiguous()

    def paper():
        V, q = reference.static_setup(batch, DAMPING)
        reference.static_diagonal(V, q, DAMPING)

    def read_and_multiply():
        torch.bmm(batch, batch.mT)

    ours = lambda: mfac.StaticInverseFisher(G, DAMPING, block_size=block_size).diagonal()  # noqa: E731
    times = seconds(ours=ours, read_and_multiply=read_and_multiply, paper=paper)
    return {
        "what": "set-up and diagonal, blocks", "d": d, "m": m, "block_size": block_size,
        **{f"{name}_s": value for name, value in times.items()},
        "times_faster_than_algorithm_3": times["paper"] / times["ours"],
        "of_reading_and_multiplying_once": times["ours"] / times["read_and_multiply"],
    }  # fmt: skip


def main():
    rows = []
    for measure, arguments in [
        (blocks, (128, 64)), (blocks, (2048, 400)), (blocks, (128, 1024)), (full, (512,)), (full, (1024,)),
    ]:  # fmt: skip
        rows.append(measure(*arguments))
        show(rows[-1])
    save("static", "python benchmarks/bench_static.py", rows)


if __name__ == "__main__":
    main()

"""Static set-up and diagonal of the full matrix: against the paper's Algorithm 3 and against the flop limit."""

import mfac
from mfac import reference
from timing import in_seconds, matmul_rate, save, seconds, unit_rows

DAMPING = 1e-5


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
        "what": "set-up and diagonal, full", "d": d, "m": m, **in_seconds(times),
        "times_faster_than_algorithm_3": times["paper"] / times["ours"],
        "of_the_flop_limit": times["ours"] / times["product"],
        "float64_of_the_flop_limit": times["ours_float64"] / times["product"],
        "matmul_gflops": matmul_rate(m, d) / 1e9,
    }  # fmt: skip


def main():
    save("static", "python benchmarks/bench_static.py", map(full, (512, 1024)))


if __name__ == "__main__":
    main()

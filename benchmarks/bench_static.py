"""Static set-up, diagonal and products of the full matrix: against the paper's Algorithm 3 and plain torch."""

import torch

import mfac
from mfac import reference
from peers.matrices import real_rows
from timing import in_seconds, save, seconds, unit_rows

DAMPING = 1e-5


def measured(kind, G, block_size=None, damping=DAMPING):
    """The full matrix, or blocks, which Algorithm 3 and the product take all at once; it runs at one damping only."""
    m, d = len(G), G.shape[1] // (block_size or 1) * (block_size or 1)
    G, x = G[:, :d].contiguous(), torch.randn(d)
    batch = G if block_size is None else G.unflatten(1, (-1, block_size)).transpose(0, 1).contiguous()
    ours = lambda precision: mfac.StaticInverseFisher(G, damping, block_size=block_size, precision=precision)  # noqa: E731

    def paper():
        V, q = reference.static_setup(batch, DAMPING)
        reference.static_diagonal(V, q, DAMPING)

    op, exact = ours("auto"), ours("float64")
    op @ x  # the first answer may need a Gram matrix in float64, which is then kept
    times = seconds(
        ours=lambda: ours("auto").diagonal(),
        ours_float64=lambda: ours("float64").diagonal(),
        product=lambda: batch.mT @ batch if (block_size or d) <= m else batch @ batch.mT,  # the smaller matrix
        applied=lambda: op @ x,
        two_passes=lambda: (G @ x) @ G,
        **({"paper": paper} if damping == DAMPING else {}),
    )
    # 2 m² d flops, half for the Gram matrix and half for the whitening, are those of one plain product.
    return {
        "gradients": kind, "d": d, "m": m, "damping": damping, **in_seconds(times),
        **({"times_faster_than_algorithm_3": times["paper"] / times["ours"]} if "paper" in times else {}),
        "of_the_flop_limit": times["ours"] / times["product"],
        "float64_of_the_flop_limit": times["ours_float64"] / times["product"],
        "applied_of_two_passes": times["applied"] / times["two_passes"],
        "largest_error_of_the_diagonal": float((op.diagonal() / exact.diagonal() - 1).abs().max()),
        "matmul_gflops": 2 * m**2 * d / times["product"] / 1e9,
    }  # fmt: skip


def cases():
    name, G = real_rows(1024)
    yield from (measured(name, G[:m]) for m in (256, 512, 1024))
    yield from (measured(name, G[:m], damping=damping) for damping in (1e-3, 1e-4, 1e-6) for m in (256, 512, 1024))
    yield from (measured("norm 1", unit_rows(m, 270_000)) for m in (512, 1024))


if __name__ == "__main__":
    save("static", "python benchmarks/bench_static.py", cases())

"""The machine's limits: how fast it reads memory and multiplies matrices, and how much memory there is."""

import torch

from mfac.memory import available_memory
from peers.cells import best_of

PASS = (128, 2_000_000)  # 1 GB, beyond any cache
PRODUCT = (1024, 4096)


def limits():
    """Measured as the contenders use it: a matrix by a vector, and a matrix by a matrix."""
    G, x = torch.ones(PASS), torch.ones(PASS[1])
    A = torch.randn(PRODUCT)
    wide, flops = A.double(), 2 * PRODUCT[0] ** 2 * PRODUCT[1]
    return {
        "bytes_a_second": G.nbytes / best_of(lambda: G @ x, None, 5),
        "flops_a_second": flops / best_of(lambda: A @ A.T, None, 5),
        "float64_flops_a_second": flops / best_of(lambda: wide @ wide.T, None, 5),
        "memory_bytes": available_memory(torch.device("cpu")),
    }


def measure(cell, report, folder):
    measured = limits()
    report.ready()
    return measured


def step_limit(machine, m, d):
    """Two passes over the window, at the speed of memory."""
    return 2 * 4 * m * d / machine["bytes_a_second"]


def set_up_limit(machine, m, d):
    """2m²d flops, half for the Gram matrix and half for the whitening; for small m, reading the matrix once."""
    return max(2 * m * m * d / machine["flops_a_second"], 4 * m * d / machine["bytes_a_second"])

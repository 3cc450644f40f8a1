"""F⁻¹ of a fixed set of gradients: set-up, one product, the diagonal. Contenders on the same matrix."""

import time

import torch

import mfac
from mfac import reference
from peers.cells import PATIENCE, forget_peak, peak, resident
from peers.matrices import DAMPING, error, load_truth, rows, sampled_columns, vector, worst

TOLERANCE, MOST_ITERATIONS = 1e-5, 1000
MOST_ROUNDS = 50


def conjugate_gradients(G, x, damping=DAMPING, tolerance=TOLERANCE, most=MOST_ITERATIONS):
    """y with ‖Fy − x‖ ≤ tolerance ‖x‖, in the dtype of G, and how many iterations that took."""
    m = len(G)
    y, r = torch.zeros_like(x), x.clone()
    p, square = r.clone(), r @ r
    enough = tolerance**2 * square
    for iteration in range(most):
        if square <= enough:
            return y, iteration
        Fp = torch.addmv(damping * p, G.T, G @ p, alpha=1 / m)
        step = square / (p @ Fp)
        y.add_(p, alpha=float(step))
        r.sub_(Fp, alpha=float(step))
        square, before = r @ r, square
        p.mul_(float(square / before)).add_(r)
    return y, most


class Ours:
    def __init__(self, G):
        self.inverse = mfac.StaticInverseFisher(G, DAMPING)

    def product(self, x):
        return self.inverse @ x

    def diagonal(self):
        return self.inverse.diagonal()


class OursInFloat32(Ours):
    """Where "auto" goes over to float64 to keep its promise, this does not."""

    def __init__(self, G):
        self.inverse = mfac.StaticInverseFisher(G, DAMPING, precision="float32")


class Algorithm3:
    def __init__(self, G):
        self.V, self.q = reference.static_setup(G, DAMPING)

    def product(self, x):
        return reference.static_multiply(self.V, self.q, x, DAMPING)

    def diagonal(self):
        return reference.static_diagonal(self.V, self.q, DAMPING)


class WoodFisher(Ours):
    """The dense inverse by rank-one steps, which WoodFisher keeps small by blocks; here it is the same full matrix."""

    def __init__(self, G):
        self.inverse = reference.woodbury_recursion(G, DAMPING)


class DenseInverse(Ours):
    def __init__(self, G):
        F = torch.addmm(DAMPING * torch.eye(G.shape[1]), G.T, G, alpha=1 / len(G))
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(F))


class ConjugateGradients:
    def __init__(self, G):
        self.G = G

    def product(self, x):
        answer, self.iterations = conjugate_gradients(self.G, x)
        return answer


CONTENDERS = {
    "mfac": (Ours, lambda m, d: 4 * m * d + 24 * m * m),
    "mfac, float32": (OursInFloat32, lambda m, d: 4 * m * d + 24 * m * m),
    "Algorithm 3": (Algorithm3, lambda m, d: 8 * m * d),
    "conjugate gradients": (ConjugateGradients, lambda m, d: 4 * m * d + 20 * d),
    "WoodFisher": (WoodFisher, lambda m, d: 4 * m * d + 16 * d * d),
    "dense inverse": (DenseInverse, lambda m, d: 4 * m * d + 12 * d * d),
}


def measure(cell, report, folder):
    m, d = cell["m"], cell["d"]
    start = resident()
    G, x = rows(m, d), vector(d)
    true = load_truth(folder, m, d)
    make = CONTENDERS[cell["method"]][0]
    forget_peak()
    report.ready()
    row = _round(make, G, x, lambda name, answer: _error(name, answer, true))
    row["peak_bytes"] = peak() - start
    report.first(row)
    began = time.perf_counter()
    for _ in range(MOST_ROUNDS):
        again = _round(make, G, x, lambda name, answer: None)
        row |= {name: min(row[name], again[name]) for name in row if name.endswith("_s")}
        if time.perf_counter() - began > PATIENCE["seconds"]:
            break
    return row


def _round(make, G, x, judge):
    """Times and errors of set-up, product and diagonal, of a contender that is new: it may remember its diagonal."""
    row = {}

    def timed(name, action):
        began = time.perf_counter()
        answer = action()
        row[f"{name}_s"] = time.perf_counter() - began
        if name != "set_up":
            row[f"{name}_error"] = judge(name, answer)
        return answer

    contender = timed("set_up", lambda: make(G))
    timed("product", lambda: contender.product(x))
    if hasattr(contender, "diagonal"):
        timed("diagonal", contender.diagonal)
    else:
        row["iterations"] = contender.iterations
    return row


def _error(name, answer, true):
    if true is None:
        return None
    if name == "diagonal":
        return worst(answer[sampled_columns(len(answer))], true["diagonal"])
    return error(answer, true["product"])

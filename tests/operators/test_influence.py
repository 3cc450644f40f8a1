"""Influence against retraining, Hessians and leverages against dense matrices, evidence against a known answer."""

import sys

import numpy as np
import oracle
import pytest
import torch
from cases import OPERATORS, ROWS, fill, mixed, write
from scipy.stats import multivariate_normal
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.gradients import hessian

RIDGE = {"primal": (60, 7, 1e-2), "dual": (20, 50, 1e-2), "linear regression": (60, 7, 1e-12), "square": (30, 30, 1e-3)}


def regression(N, d, damping):
    """Rows x_i, targets, and the θ that minimizes (1/N) Σ ½(x_i·θ − y_i)² + ½λ‖θ‖² without some of them."""
    X, y = mixed(N, d, 2.0, torch.float64), mixed(1, N, 3.0, torch.float64, seed=1)[0]

    def fit(left_out=()):
        kept = [i for i in range(N) if i not in left_out]
        F = torch.from_numpy(oracle.fisher(X[kept] * (len(kept) / N) ** 0.5, damping).astype(float))
        return torch.linalg.solve(F, X[kept].T @ y[kept] / N)

    return X, y, fit


SOURCES = {
    "memory": lambda rows, folder: rows,
    "disk": lambda rows, folder: write(rows, folder / "train.mfac"),
    "blocks": lambda rows, folder: rows.split(7),
    "streamed": lambda rows, folder: iter(rows),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("size", RIDGE.values(), ids=RIDGE.keys())
def test_regression_is_retraining_without_the_sample(size, source, tmp_path):
    X, y, fit = regression(*size)
    theta, tests = fit(), mixed(3, size[1], dtype=torch.float64, seed=2)
    op = mfac.StaticInverseFisher(X, size[2])  # Gauss-Newton rows
    train = source((X @ theta - y)[:, None] * X, tmp_path)  # gradients of the losses
    change = mfac.influence(op, tests, train, leverage=True)
    retrained = torch.stack([tests @ (fit([i]) - theta) for i in range(len(X))], dim=1)
    assert oracle.error(change, oracle.wide(retrained)) < 1e-9


@pytest.mark.parametrize("size", RIDGE.values(), ids=RIDGE.keys())
def test_leaving_out_several_rows_is_retraining_without_them(size):
    X, y, fit = regression(*size)
    theta, rows = fit(), [2, 3, 11]
    residuals = X @ theta - y
    op = mfac.leave_out(mfac.StaticInverseFisher(X, size[2]), rows)
    assert oracle.error(op @ (residuals[rows] @ X[rows]) / len(X), oracle.wide(fit(rows) - theta)) < 1e-9
    assert torch.equal(mfac.leave_out(op, 5) @ theta, mfac.leave_out(op, torch.tensor([5]).byte()) @ theta)
    assert torch.equal(mfac.leave_out(op, []) @ theta, op @ theta)


HOLDERS = {name: OPERATORS[name] for name in ("full", "pages", "disk", "dynamic")}


@pytest.mark.parametrize("build", HOLDERS.values(), ids=HOLDERS.keys())
@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_first_order_and_leverages_equal_dense(build, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["mfac.influence"], "BLOCK", 5 * shape[1])  # several blocks of rows
    rows, tests = mixed(*shape), mixed(9, shape[1], seed=1)
    op, (dense, _) = build(rows, 1e-2, tmp_path).op, oracle.inverse(oracle.fisher(rows, 1e-2))
    G, truth = oracle.wide(rows), oracle.wide(tests) @ dense @ oracle.wide(rows).T
    assert oracle.error(mfac.influence(op, tests), truth / shape[0]) < 1e-5
    more = mfac.influence(op, tests, torch.cat([rows, rows]))  # a training set larger than the window
    assert oracle.error(more[:, shape[0] :], truth / (2 * shape[0])) < 1e-5
    assert oracle.error(mfac.influence(op, tests, rows[:3], num_samples=100), truth[:, :3] / 100) < 1e-5
    assert oracle.error(mfac.leverages(op), np.einsum("id,de,ie->i", G, dense, G) / shape[0]) < 1e-5
    F = oracle.fisher(rows, 1e-2) - np.outer(G[3], G[3]) / shape[0]
    assert oracle.error(mfac.leave_out(op, 3).to_dense(), oracle.inverse(F)[0]) < 1e-4


@pytest.mark.parametrize("damping", [1e-8, 1e-2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_every_damping_gives_finite_influence_and_leverages_in_range(rows, damping):
    op = mfac.StaticInverseFisher(rows, damping)
    try:
        h, change = mfac.leverages(op), mfac.influence(op, rows, rows, leverage=True)
    except torch.linalg.LinAlgError:  # fewer than four digits, which float64 cannot help
        assert oracle.condition(rows, damping) > 1e10
        return
    assert ((h >= 0) & (h <= 1)).all()
    assert change.isfinite().all()
    assert (change.diagonal() >= 0).all()  # a sample is never worse off for its own presence


DECAY, LOSS = 0.5, mfac.criterion_loss(nn.CrossEntropyLoss())


def network():
    """A network with a hidden layer, batches of unequal size, and the dense Hessian of its objective."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 3)).double()
    x, y = torch.randn(30, 4).double(), torch.randint(3, (30,))

    def objective(theta):
        weights = theta.split([p.numel() for p in model.parameters()])
        (W, b, V, c) = (w.view(p.shape) for w, p in zip(weights, model.parameters(), strict=True))
        return F.cross_entropy((x @ W.T + b).tanh() @ V.T + c, y) + DECAY / 2 * theta.square().sum()

    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    return model, list(zip(x.split([20, 10]), y.split([20, 10]), strict=True)), torch.func.hessian(objective)(theta)


def test_products_with_the_hessian_are_those_of_the_dense_one(monkeypatch):
    monkeypatch.setattr(hessian, "COLUMNS", 4)
    model, batches, H = network()
    X = torch.randn(len(H), 10).double()
    product = mfac.hessian_product(model, LOSS, batches, DECAY)
    assert oracle.error(product(X), oracle.wide(H @ X)) < 1e-12
    assert model.training
    assert model[0].weight.grad is None
    with torch.inference_mode():
        last = mfac.hessian_product(model, LOSS, batches, DECAY, params="3.weight")(X[:18])
    assert oracle.error(last, oracle.wide(H[30:48, 30:48] @ X[:18])) < 1e-12
    model.float()
    single = [(x.float(), y) for x, y in batches]
    assert oracle.error(mfac.hessian_product(model, LOSS, single, DECAY)(X), oracle.wide(H @ X)) < 1e-5


def test_a_hessian_takes_the_place_of_the_fisher_matrix(monkeypatch):
    model, batches, H = network()
    assert torch.linalg.eigvalsh(H).min() > 0.01
    rows = mfac.collect_gradients(model, LOSS, batches, 30, per_sample=True, fisher="gauss-newton")
    train = mfac.collect_gradients(model, LOSS, batches, 30, per_sample=True)
    op, tests = mfac.StaticInverseFisher(rows, DECAY), train[:5] + 0.1
    product = mfac.hessian_product(model, LOSS, batches, DECAY)
    solved = mfac.influence(op, tests, torch.eye(len(H)), hessian=product, num_samples=1)
    assert ((tests - solved @ H).norm(dim=1) <= 0.0101 * tests.norm(dim=1)).all()
    assert torch.equal(mfac.influence(op, tests, train, hessian=product, steps=0), mfac.influence(op, tests, train))
    monkeypatch.setattr(sys.modules["mfac.influence"], "RESIDUAL", 1e-13)
    truth = oracle.wide(tests @ torch.linalg.solve(H, train.T) / 30)
    assert oracle.error(mfac.influence(op, tests, train, hessian=product, steps=60), truth) < 1e-10
    assert oracle.error(mfac.influence(op, tests, train), truth) > 0.01


BENT = {
    "negative": lambda x: x * torch.linspace(-1, 1, 40)[:, None].double(),
    "zero": torch.zeros_like,
    "not finite": lambda x: x / 0,
    "tiny": lambda x: 1e-320 * x,
}


@pytest.mark.parametrize("product", BENT.values(), ids=BENT.keys())
def test_a_hessian_that_is_not_positive_definite_gives_finite_influence(product):
    tests = torch.cat([torch.eye(40)[[0, 39]], mixed(3, 40), torch.zeros(1, 40)]).double()
    solved = mfac.influence(OP, tests, torch.eye(40), hessian=product, num_samples=1)
    assert solved.isfinite().all()
    assert not solved[-1].any()
    plain = mfac.influence(OP, tests, torch.eye(40), num_samples=1)
    assert torch.equal(solved[0], plain[0])  # a direction of negative curvature: no step is taken


def test_each_test_gradient_stops_for_itself():
    """Of a Hessian that is positive for one of them, and not for the other."""
    H, blind = torch.linspace(0.5, 4, 40).double(), mfac.StaticInverseFisher(torch.zeros(1, 40), 1.0)
    H[20:] *= -1
    tests = torch.zeros(2, 40).double()
    tests[0, :20], tests[1, 20:] = 1, 1
    solved = mfac.influence(blind, tests, torch.eye(40), hessian=lambda x: H[:, None] * x, num_samples=1)
    assert ((solved[0] * H - tests[0]).norm() <= 0.01 * tests[0].norm()).all()
    assert torch.equal(solved[1], tests[1])


LARGE = 1e3 + torch.arange(4.0)[:, None]
OP = mfac.StaticInverseFisher(mixed(12, 40), 1e-2)
BLOCKED = mfac.StaticInverseFisher(mixed(12, 40), 1e-2, block_size=8)
SUMS = mfac.FisherBlocks(40, 40)
SUMS.add(mixed(12, 40))
CHANGED = mfac.StaticInverseFisher(changed := mixed(40, 12), 1e-2)
changed.zero_()
REFUSED = {
    "other width": (lambda: mfac.influence(OP, mixed(2, 41)), r"test_grads must be rows \[k, 40\].* \[2, 41\]"),
    "ints": (lambda: mfac.influence(OP, mixed(2, 40), torch.ones(3, 40).long()), "train_grads must be a dense fl"),
    "no tensor": (lambda: mfac.influence(OP, [[1.0]]), "not list"),
    "no rows": (lambda: mfac.influence(OP, mixed(2, 40), []), "train_grads holds no rows"),
    "empty": (lambda: mfac.influence(OP, mixed(2, 40)[:0]), "test_grads holds no rows"),
    "sparse": (lambda: mfac.influence(OP, mixed(2, 40).to_sparse()), "test_grads must be a dense"),
    "not finite": (lambda: mfac.influence(OP, mixed(2, 40), mixed(3, 40) / 0), "training gradient 0 is not finite"),
    "no number": (lambda: mfac.influence(OP, mixed(2, 40) * torch.nan), "the vector has numbers that are not finite"),
    "no N": (lambda: mfac.influence(OP, mixed(2, 40), num_samples=0), "num_samples must be the size"),
    "no steps": (lambda: mfac.influence(OP, mixed(2, 40), steps=-1), "steps must be how many steps"),
    "no product": (lambda: mfac.influence(OP, mixed(2, 40), hessian=lambda x: x[0]), r"shape \[40, 2\].* not \[2\]"),
    "spent": (lambda: mfac.hessian_product(nn.Linear(2, 1), LOSS, iter(()), 1.0)(torch.ones(3, 1)), "batches gave no"),
    "no matrix": (lambda: mfac.hessian_product(nn.Linear(2, 1), LOSS, [], 1.0)(torch.ones(3)), r"\[3, k\].* not \[3\]"),
    "int x": (lambda: mfac.hessian_product(nn.Linear(2, 1), LOSS, [], 1.0)(torch.eye(3).int()), "x must be a dense"),
    "no columns": (lambda: mfac.hessian_product(nn.Linear(2, 1), LOSS, [], 1.0)(torch.ones(3, 0)), r"not \[3, 0\]"),
    "row by row": (lambda: mfac.influence(OP, mixed(2, 40), mixed(5, 40), leverage=True), "12 rows, and train_grads 5"),
    "blocks": (lambda: mfac.leverages(BLOCKED), "use block_size=None"),
    "sums": (lambda: mfac.leverages(mfac.StaticInverseFisher(SUMS)), "keep sums and no rows"),
    "no window": (lambda: mfac.leverages(mfac.DynamicInverseFisher(3, 4)), "holds no gradient yet"),
    "no such row": (lambda: mfac.leave_out(OP, [3, 12]), r"rows must lie in 0 \.\. 11"),
    "too few digits": (lambda: mfac.leverages(fill(mfac.DynamicInverseFisher(4, 1, 1e-10), LARGE)), "fewer than four"),
    "too few, det": (lambda: fill(mfac.DynamicInverseFisher(4, 1, 1e-10), LARGE).logdet(), "fewer than four digits"),
    "changed rows": (lambda: mfac.leave_out(CHANGED, 1), "have changed since it was built"),
    "mask": (lambda: mfac.leave_out(OP, torch.ones(12, dtype=torch.bool)), "take mask.nonzero"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        call()


@pytest.mark.parametrize("shape", [(30, 5), (12, 40)])
def test_laplace_of_a_regression_is_its_posterior(shape):
    """Prior N(0, I/α), noise σ²: the posterior has precision (N/σ²) F with λ = ασ²/N, and y is normal."""
    N, noise, (X, y, _) = shape[0], 0.3, regression(*shape, 1e-2)
    op = mfac.StaticInverseFisher(X)
    for alpha in (0.1, 1.0, 10.0):
        op.damping = alpha * noise / N
        theta = op @ (X.T @ y) / N
        fit = -0.5 * (N * np.log(2 * np.pi * noise) + (X @ theta - y).square().sum() / noise + alpha * theta @ theta)
        evidence = fit + 0.5 * (shape[1] * np.log(alpha * noise / N) + op.logdet())
        covariance = noise * np.eye(N) + (X @ X.T).numpy() / alpha
        assert float(evidence) == pytest.approx(multivariate_normal.logpdf(y.numpy(), np.zeros(N), covariance))
        variance = noise / N * op.quadratic_form(X.T)
        posterior = torch.linalg.inv(alpha * torch.eye(shape[1]).double() + X.T @ X / noise)
        assert torch.allclose(variance, (X @ posterior * X).sum(1), rtol=1e-8)


def test_scipy_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(ImportError, match=r"torch-mfac\[scipy\]"):
        OP.as_scipy()

"""The pure functions, against dense linear algebra."""

import oracle
import pytest
import torch
from cases import mixed

from mfac import products, woodbury

DAMPING = 1e-2


def dense_removal(F, theta, removed):
    """The #Q x #Q system solved densely: δ = −F⁻¹E (EᵀF⁻¹E)⁻¹ θ_Q, and its cost ½ δᵀFδ."""
    inverse = torch.linalg.inv(F)
    Q = removed.nonzero()[:, 0]
    delta = -inverse[:, Q] @ torch.linalg.solve(inverse[Q][:, Q], theta[Q])
    return delta, 0.5 * delta @ F @ delta


@pytest.mark.parametrize("count", [1, 5, 15, 29, 30])
@pytest.mark.parametrize("known_gram", [True, False])
def test_joint_removal_equals_the_dense_system(count, known_gram):
    G, theta = mixed(10, 30, 2.0, torch.float64), torch.randn(30, dtype=torch.float64)
    removed = torch.zeros(30, dtype=torch.bool)
    removed[torch.randperm(30)[:count]] = True
    F = DAMPING * torch.eye(30) + G.T @ G / 10
    delta, cost = woodbury.joint_removal(G, theta, removed, DAMPING, G @ G.T if known_gram else None)
    expected, expected_cost = dense_removal(F.double(), theta, removed)
    assert torch.allclose(delta, expected, atol=1e-7)
    assert torch.allclose(cost, expected_cost, rtol=1e-6)
    assert torch.equal((theta + delta)[removed], torch.zeros(count, dtype=torch.float64))


def test_joint_removal_of_nothing_changes_nothing():
    G, theta = mixed(10, 30, 1.0, torch.float64), torch.randn(30, dtype=torch.float64)
    delta, cost = woodbury.joint_removal(G, theta, torch.zeros(30, dtype=torch.bool), DAMPING)
    assert not delta.any()
    assert float(cost) == 0


def test_joint_removal_in_batches_equals_one_at_a_time():
    G, theta = mixed(6 * 10, 30, 1.0, torch.float64).view(6, 10, 30), torch.randn(6, 30, dtype=torch.float64)
    removed = torch.rand(6, 30) < 0.4
    deltas, costs = woodbury.joint_removal(G, theta, removed, DAMPING)
    for block in range(6):
        delta, cost = woodbury.joint_removal(G[block], theta[block], removed[block], DAMPING)
        assert torch.allclose(deltas[block], delta)
        assert torch.allclose(costs[block], cost)


def test_factor_and_its_relatives_in_batches():
    G = mixed(5 * 8, 20, 1.0, torch.float64).view(5, 8, 20)
    K = products.gram(G, torch.float64)
    L = woodbury.factor(K, 8 * DAMPING)
    S = K + 8 * DAMPING * torch.eye(8, dtype=torch.float64)
    b, B = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, 3, dtype=torch.float64)
    assert torch.allclose(L @ L.mT, S)
    assert torch.allclose(woodbury.inverse_factor(L) @ L, torch.eye(8, dtype=torch.float64).expand(5, 8, 8), atol=1e-9)
    assert torch.allclose(woodbury.solve(L, b), torch.linalg.solve(S, b))
    assert torch.allclose(woodbury.solve(L, B), torch.linalg.solve(S, B))
    assert torch.allclose(woodbury.half_solve(L, b).square().sum(-1), (b * torch.linalg.solve(S, b)).sum(-1))
    F = DAMPING * torch.eye(20, dtype=torch.float64) + G.mT @ G / 8
    assert torch.allclose(woodbury.log_det_fisher(L, 8 * DAMPING, DAMPING, 20), torch.logdet(F))
    inverse, logdet = woodbury.primal_inverse(G.mT @ G / 8, DAMPING)
    assert torch.allclose(inverse, torch.linalg.inv(F))
    assert torch.allclose(logdet, torch.logdet(F))


def test_a_matrix_beyond_float64_is_an_error_that_names_damping_scale_and_remedy():
    G = torch.full((3, 5), 1e12, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match=r"adds 3e-08 .* up to 5e\+24.*raise the damping"):
        woodbury.factor(G @ G.T, 3e-8)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("computed", [torch.float32, torch.float64])
def test_products_do_not_depend_on_how_they_are_cut(stored, computed, monkeypatch):
    for name, size in (
        ("TILE", 64),
        ("TILE_COLUMNS", 16),
        ("GRAM_COLUMNS", 16),
        ("WHITEN_COLUMNS", 16),
        ("LEAST_ROWS", 4),
        ("WHITEN_ROWS", 4),
    ):
        monkeypatch.setattr(products, name, size)
    G = mixed(10, 50, 1.0, stored)
    exact, x, a = G.double(), torch.randn(50, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    lower = torch.randn(10, 10, dtype=torch.float64).tril()
    close = {"rtol": 1e-5, "atol": 1e-5} if computed == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    batch = G.unflatten(1, (5, 10)).transpose(0, 1)
    assert torch.allclose(products.project(G, x, computed), exact @ x, **close)
    assert torch.allclose(products.combine(G, a, computed).double(), a @ exact, **close)
    assert torch.allclose(products.gram(G, computed), exact @ exact.T, **close)
    assert torch.equal(products.gram(G, computed), products.gram(G, computed).T)
    assert torch.allclose(products.gram(batch, computed), batch.double() @ batch.double().mT, **close)
    assert torch.allclose(products.whitened_squares(lower, G, computed), (lower @ exact).square().sum(0), **close)
    assert torch.allclose(products.column_squares(G, a, computed), a @ exact.square(), **close)
    if stored == computed:
        assert torch.allclose(products.whiten_(lower, G.clone(), computed).double(), lower @ exact, **close)


def test_the_oracle_itself_inverts():
    F = oracle.fisher(mixed(10, 30), 1e-6)
    inverse, logdet = oracle.inverse(F)
    assert abs(F @ inverse - oracle.np.eye(30)).max() < 1e-10
    assert float(logdet) == pytest.approx(-float(torch.logdet(torch.tensor(F.astype(float)))))

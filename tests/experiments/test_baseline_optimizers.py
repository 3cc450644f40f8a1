"""The optimizers that M-FAC is compared with, against dense matrices."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experiments.baselines.ggt import GGT, ggt_step
from experiments.baselines.kfac import KFAC, cholesky_factors, damped_factors, solve_factors
from experiments.contenders import plain_contenders, resnet_contenders


def dense_root_step(rows, v, count, eps):
    """[(M Mᵀ)^½ + ε I]⁻¹ v with the d x d matrix and its eigenvectors."""
    M = rows.T / count**0.5
    squares, Q = torch.linalg.eigh(M @ M.T)
    return Q @ ((Q.T @ v) / (squares.clamp_min(0).sqrt() + eps))


@pytest.mark.parametrize("count", [2, 5])
def test_ggt_is_the_inverse_root_of_the_dense_matrix(count):
    rows = torch.randn(5, 12).double()
    rows[count:] = 0
    step = ggt_step(rows, 1, count, 1e-2)
    torch.testing.assert_close(step, dense_root_step(rows, rows[1], count, 1e-2), rtol=1e-9, atol=1e-9)


def test_ggt_averages_gradients_and_forgets_the_oldest():
    w = nn.Parameter(torch.randn(6).double())
    optimizer = GGT([w], lr=0.1, window=3, beta=0.5, eps=0.1, weight_decay=0.2)
    average, rows, expected = torch.zeros(6).double(), [], w.detach().clone()
    for t in range(5):
        gradient = torch.randn(6).double()
        average = 0.5 * average + 0.5 * (gradient + 0.2 * expected)
        rows = [*rows, average][-3:]
        expected = expected - 0.1 * dense_root_step(torch.stack(rows), average, min(t + 1, 3), 0.1)
        w.grad = gradient
        optimizer.step()
        torch.testing.assert_close(w.detach(), expected, rtol=1e-8, atol=1e-8)


def test_a_kfac_step_is_the_inverse_of_the_dense_kronecker_block():
    S, A = torch.randn(3, 3).double(), torch.randn(5, 5).double()
    S, A, G = S @ S.T, A @ A.T, torch.randn(3, 5).double()
    expected = torch.linalg.solve(torch.kron(*damped_factors(S, A, 0.01)), G.flatten()).view(3, 5)
    torch.testing.assert_close(solve_factors(*cholesky_factors(S, A, 0.01), G), expected, rtol=1e-8, atol=1e-8)


def test_kfac_preconditions_every_layer_and_leaves_the_rest_plain():
    convolution, norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
    model = nn.Sequential(convolution, nn.ReLU(), norm, nn.Flatten(), nn.Linear(48, 4)).double()
    before = copy.deepcopy(model)
    optimizer = KFAC(model, lr=0.1, damping=0.1, momentum=0.0, weight_decay=0.01, clip=None)
    images, labels = torch.randn(6, 2, 4, 4).double(), torch.arange(6) % 4
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    for layer, old in ((model[0], before[0]), (model[4], before[4])):
        state = optimizer.state[layer.weight]
        G = torch.cat([(layer.weight.grad + 0.01 * old.weight).flatten(1),
                       (layer.bias.grad + 0.01 * old.bias)[:, None]], 1)  # fmt: skip
        dense = torch.kron(*damped_factors(state["S"], state["A"], 0.1))
        step = torch.linalg.solve(dense, G.flatten()).view_as(G)
        torch.testing.assert_close(layer.weight.flatten(1), old.weight.flatten(1) - 0.1 * step[:, :-1])
        torch.testing.assert_close(layer.bias, old.bias - 0.1 * step[:, -1])
    old = before[2].weight
    torch.testing.assert_close(norm.weight, old - 0.1 * (norm.weight.grad + 0.01 * old))


def test_the_papers_settings_are_the_contenders():
    ours = resnet_contenders(20)["M-FAC"].make(nn.Linear(2, 2))
    # In the units of the sum over 512 gradients: the paper's 1e-3 and 1e-5.
    assert ours.param_groups[0]["lr"] == pytest.approx(0.512)
    assert ours.damping == pytest.approx(512e-5)
    assert resnet_contenders(32)["AdaHessian"].decay == 5e-4
    assert all(contender.decay == 0 for contender in plain_contenders().values())

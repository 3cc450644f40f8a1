"""FullMatrixAdam: equal to its rule on dense matrices in float64, free of scales, and its limits."""

import math

import pytest
import torch
from optimizers import full_matrix, loss_of, network, ready, train, trained
from states import moved, weights
from torch import nn

from mfac import FullMatrixAdam
from mfac.full_matrix_adam import full_matrix_coefficients, is_matrix, orthogonalized


def dense_step(rows, beta, damping, power):
    """Oldest row first: λ^p F^-p of the average of all rows, F of the averages up to each row, as a d x d matrix."""
    averages = []
    for newest in range(len(rows)):
        weights = torch.tensor([beta ** (newest - i) for i in range(newest + 1)], dtype=torch.float64)
        averages.append(weights @ rows[: newest + 1] / weights.sum())
    averages = torch.stack(averages)
    moment = averages.T @ averages / len(rows)
    shift = damping * moment.trace() / len(rows)
    values, vectors = torch.linalg.eigh(moment + shift * torch.eye(rows.shape[1]).double())
    return vectors @ ((values / shift) ** -power * (vectors.T @ averages[-1]))


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("n", "newest"), [(1, 0), (6, 5), (8, 2)])
def test_coefficients_equal_a_power_of_the_dense_matrix(power, n, newest):
    U = torch.randn(n, 12, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    ages = (newest - torch.arange(n, dtype=torch.float64)) % n
    c = full_matrix_coefficients(U @ U.T, ages, 0.3, beta=0.8, power=power)
    expected = dense_step(U[ages.argsort(descending=True)], 0.8, 0.3, power)
    torch.testing.assert_close(U.T @ c, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_trajectories_equal_the_rule_on_dense_matrices(power):
    """Through the wrap-around of the window; every tensor moves `length` times as far as under Adam."""
    betas, damping, eps, lr, decay, m = (0.8, 0.95), 0.2, 1e-2, 0.01, 0.1, 5
    model = network().double()
    optimizer = FullMatrixAdam(model.parameters(), lr, m, betas=betas, damping=damping, power=power, eps=eps,
                               weight_decay=decay)  # fmt: skip
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    sizes = [parameter.numel() for parameter in model.parameters()]
    v, average, rows = torch.zeros_like(w), torch.zeros_like(w), []
    for t in range(1, 14):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        g = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        v = betas[1] * v + (1 - betas[1]) * g**2
        root = (v / (1 - betas[1] ** t)).sqrt()
        rows = [*rows, g / (root + eps * root.mean())][-m:]
        average = betas[0] * average + (1 - betas[0]) * rows[-1]
        parts = zip(dense_step(torch.stack(rows), betas[0], damping, power).split(sizes), average.split(sizes),
                    strict=True)  # fmt: skip
        step = torch.cat([1.5 * z * (u.norm() / (1 - betas[0] ** t)) / z.norm() for z, u in parts])
        w = (1 - lr * decay) * w - lr * step
        with torch.device("meta"):  # the default device does not matter
            optimizer.step()
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), w, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("orthogonalize", [False, True])
def test_every_tensor_moves_as_far_as_under_adam_also_under_masks(orthogonalize):
    model, other = network(), network()
    mask = torch.rand(model[0].weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    with torch.no_grad():
        model[0].weight.mul_(mask)
        other[0].weight.mul_(mask)
    optimizer = FullMatrixAdam(model.parameters(), 0.01, 5, betas=(0.9, 0.999), length=1.0, eps=1e-12,
                               orthogonalize=orthogonalize, masks={model[0].weight: mask})  # fmt: skip
    adam = torch.optim.Adam(other.parameters(), 0.01, eps=1e-12)
    loss_of(model, 0).backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    other[0].weight.grad *= mask
    model[0].weight.grad[~mask] = torch.inf
    before = weights(model)
    optimizer.step()
    adam.step()
    for old, ours, theirs in zip(before, weights(model), weights(other), strict=True):
        torch.testing.assert_close((ours - old).norm(), (theirs - old).norm(), rtol=1e-4, atol=1e-7)


def scaled(scale, **options):
    model = network()
    train(model, full_matrix(model.parameters(), **options), range(20), scale)
    return weights(model)


@pytest.mark.parametrize("exponent", [-80, -20, 20, 80])
def test_the_loss_times_a_power_of_two_gives_the_same_bits(exponent):
    assert all(map(torch.equal, scaled(2.0**exponent), scaled(1.0)))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("orthogonalize", [False, True])
def test_the_loss_times_a_constant_gives_the_same_trajectory_to_rounding(scale, orthogonalize):
    found, expected = (scaled(factor, orthogonalize=orthogonalize) for factor in (scale, 1.0))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 1.0, 3e38])
@pytest.mark.parametrize("orthogonalize", [False, True])
def test_no_finite_gradient_is_an_error(value, orthogonalize):
    """Repeated, alternating and one-sided gradients of any size."""
    model = network()
    optimizer = full_matrix(model.parameters(), orthogonalize=orthogonalize)
    for step in range(12):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, value * (-1) ** (step // 4) * (number != step % 4))
        optimizer.step()
    assert all(tensor.isfinite().all() for tensor in model.parameters())
    assert any(moved(weights(network()), model)) is (value > 0)


def test_it_descends_a_rotated_valley_faster_than_adam():
    """A quadratic of condition number 1e4 whose axes are not those of the weights."""
    axes = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)))[0]
    H = axes @ torch.diag(torch.logspace(-4, 0, 40)) @ axes.T

    def last(build):
        w = torch.ones(40, requires_grad=True)
        optimizer = build([w])
        for step in range(300):
            optimizer.param_groups[0]["lr"] = 0.03 * (1 + math.cos(math.pi * step / 300)) / 2
            optimizer.zero_grad()
            loss = (w @ H @ w) / 2
            loss.backward()
            optimizer.step()
        return loss.item()

    assert last(FullMatrixAdam) < 0.5 * last(torch.optim.Adam)


def test_orthogonalized_steps_of_matrices_have_nearly_equal_singular_values():
    for shape in ((12, 30), (30, 12), (8, 3, 3, 3)):
        Z = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-20
        values = torch.linalg.svdvals(orthogonalized(Z).flatten(1))
        assert 0.6 < values.min() < values.max() < 1.3
    assert not orthogonalized(torch.zeros(3, 4)).any()
    assert all(is_matrix(torch.empty(shape)) for shape in [(4, 4), (8, 3, 3, 3), (32, 4)])
    assert not any(is_matrix(torch.empty(shape)) for shape in [(33, 4), (1, 9), (9, 1), (9,), ()])


@pytest.mark.parametrize(("orthogonalize", "lr"), [(False, 3e-3), (True, 1e-2)])
def test_each_kind_of_step_has_its_own_default_learning_rate(orthogonalize, lr):
    optimizer = FullMatrixAdam(network().parameters(), num_grads=2, orthogonalize=orthogonalize)
    assert [group["lr"] for group in optimizer.param_groups] == [lr]


def test_a_group_can_opt_out_of_orthogonal_steps_and_vectors_keep_theirs():
    model, optimizer = ready(full_matrix, 3)
    plain, mixed = weights(model), network()
    groups = [{"params": mixed[0].parameters(), "orthogonalize": True}, {"params": mixed[2].parameters()}]
    other = full_matrix(groups)
    other.load_state_dict({**optimizer.state_dict(), "param_groups": other.state_dict()["param_groups"]})
    mixed.load_state_dict(dict(zip(mixed.state_dict(), plain, strict=True)))
    for ours, theirs in zip(mixed.parameters(), model.parameters(), strict=True):
        ours.grad = theirs.grad
    optimizer.step()
    other.step()
    same = [torch.equal(a, b) for a, b in zip(weights(model), weights(mixed), strict=True)]
    assert same == [False, True, True, True]


@pytest.mark.parametrize("window", [torch.bfloat16, torch.int8])
def test_smaller_windows_follow_the_same_course(window):
    loss, expected = (loss_of(trained(full_matrix, 30, window=each)[0], 99).item() for each in (window, None))
    assert loss == pytest.approx(expected, rel=0.05)


def test_what_belongs_to_the_window_is_one_for_all_groups_and_no_damping_is_automatic():
    _, optimizer = trained(full_matrix, 2)
    with pytest.raises(ValueError, match="power: one for all groups"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).named_parameters(), "power": 1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)  # as a schedule does
    optimizer.add_param_group({"params": nn.Linear(2, 2).named_parameters()})
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.99)
    with pytest.raises(ValueError, match="damping must be a number or a function of the steps, not 'auto'"):
        optimizer.damping = "auto"
    assert optimizer.damping == 0.1


def test_memory_needed_is_what_is_held():
    _, optimizer = trained(full_matrix, 3)
    names, states = ("rows", "root_mean_square", "average"), optimizer.state_dict()["state"].values()
    held = sum(entry[name].nbytes for entry in states for name in names)
    assert FullMatrixAdam.memory_needed(network().parameters(), 5) == held + 4 * 8 * 5**2

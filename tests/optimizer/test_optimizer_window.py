"""What the window of an optimizer is asked: its damping, its memory, its figures, and how often it is updated."""

import copy

import pytest
import torch
from optimizers import (
    mask_of,
    mfac,
    network,
    ready,
    same,
    train,
    weights,
)
from torch import nn

from mfac import MFAC, MFACPreconditioner

# Damping.


def test_a_damping_that_is_too_small_for_repeated_gradients_says_so_and_can_be_raised():
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = MFAC([parameter], num_grads=3, damping=1e-30)
    for _ in range(2):
        parameter.grad = torch.tensor([100.0, 200.0, 300.0, 400.0])
        optimizer.step()
    before = parameter.detach().clone()
    with pytest.raises(RuntimeError, match=r"not positive definite in float64: .*raise the damping .* times or more"):
        optimizer.step()
    assert torch.equal(parameter, before)
    optimizer.damping = 1.0
    optimizer.step()
    torch.testing.assert_close(before - parameter.detach(), 1e-3 * parameter.grad / (1 + 3e5), rtol=1e-4, atol=0)
    assert optimizer.diagnostics()["cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("damping", [0.0, -1.0, float("inf"), "much", None])
def test_a_wrong_damping_is_refused_and_the_old_one_stays(damping):
    model, optimizer = ready(mfac, 6)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="damping must be"):
        optimizer.damping = damping
    assert same(optimizer.state_dict(), state)
    preconditioner = MFACPreconditioner(model.parameters(), 4, 0.5)
    with pytest.raises(ValueError, match="damping must be"):
        preconditioner.damping = damping
    assert preconditioner.damping == 0.5


def test_a_schedule_is_given_the_number_of_steps_and_ends_when_damping_is_assigned():
    model, asked = network(), []

    def schedule(step):
        asked.append(step)
        return 0.1 * (1 + step)

    optimizer = mfac(model.parameters(), damping=schedule)
    train(model, optimizer, range(4))
    assert asked[1:] == [0, 1, 2, 3]
    assert optimizer.damping == pytest.approx(0.4)
    fresh = mfac(network().parameters(), damping=schedule)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(network(), fresh, [])
    train(model, optimizer, [4])
    assert optimizer.damping == pytest.approx(0.5)
    optimizer.damping = 7.0
    train(model, optimizer, [5])
    assert optimizer.damping == 7.0


def test_a_schedule_may_be_assigned_too():
    model, optimizer = ready(mfac, 3)
    optimizer.damping = lambda step: 0.25 * step
    optimizer.step()
    assert optimizer.damping == 0.75
    assert optimizer.state_dict()["state"][0]["window"]["damping"] == 0.75
    preconditioner = MFACPreconditioner(model.parameters(), 4, 0.5)
    preconditioner.damping = lambda step: 0.25 + step
    preconditioner.step()
    assert preconditioner.damping == 0.25


# Memory.


def held_bytes(optimizer):
    """What the window, its algebra and the momentum hold now."""
    operator = optimizer._window.operator
    inverse = operator._inverse
    tensors = [operator.rows, inverse.K, inverse._P, inverse._spare, inverse._L]
    tensors += [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": torch.bfloat16}, {"momentum": 0.9}, {"window": torch.float64, "momentum": 0.5}, {"num_grads": 9}],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_memory_needed_is_what_will_be_held(options, masked):
    model = network()
    masks = {"0.weight": mask_of(model[0].weight)} if masked else None
    if masked:
        model[0].weight.data.mul_(masks["0.weight"])
    sizes = {"num_grads": 5} | options
    needed = MFAC.memory_needed(model.named_parameters(), masks=masks, **sizes)
    optimizer = MFAC(model.named_parameters(), lr=1e-3, damping=0.1, masks=masks, **sizes)
    most = 0
    for step in range(75):  # there is a new factorisation after 64
        train(model, optimizer, [step])
        most = max(most, held_bytes(optimizer))
    assert most == needed


def test_memory_needed_takes_parameters_in_any_form_and_leaves_frozen_ones_out():
    model = network()
    needed = MFAC.memory_needed(model.parameters(), 5)
    assert needed == MFAC.memory_needed(model.named_parameters(), 5)
    assert needed == MFAC.memory_needed([{"params": layer.parameters()} for layer in (model[0], model[2])], 5)
    assert needed == 5 * 66 * 4 + 4 * 8 * 25
    assert MFAC.memory_needed([{"params": model.parameters(), "momentum": 0.9}], 5) == needed + 66 * 4
    model[0].requires_grad_(False)
    assert MFAC.memory_needed(model.parameters(), 5) == 5 * 24 * 4 + 4 * 8 * 25
    with pytest.raises(TypeError, match="an iterable of Tensors or dicts"):
        MFAC.memory_needed(model[0].weight)


def test_what_does_not_fit_is_refused_with_figures(monkeypatch):
    monkeypatch.setattr("mfac.windows.storage.available_memory", lambda device: 2**20)
    parameters = [nn.Parameter(torch.zeros(1000))]
    words = (
        r"a window of 1024 gradients of 1000 weights in torch.float32 needs .*35.9 MiB on cpu and 1.0 MiB are "
        r"available; num_grads=\d+ would fit, or \d+ of them with window=torch.bfloat16"
    )
    for build in (MFAC, MFACPreconditioner):
        with pytest.raises(MemoryError, match=words):
            build(parameters)
    optimizer = MFAC(parameters, num_grads=100)
    extra = nn.Parameter(torch.zeros(10000))
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(MemoryError, match="a window of 100 gradients of 11000 weights"):
        optimizer.add_param_group({"params": extra})
    assert same(optimizer.state_dict(), state)
    assert len(optimizer.param_groups) == 1
    parameters[0].grad = torch.ones(1000)
    optimizer.step()


# Figures.


def test_diagnostics_are_those_of_the_step():
    torch.manual_seed(5)
    parameter = torch.randn(6, dtype=torch.float64).requires_grad_()
    optimizer = MFAC([parameter], lr=0.5, num_grads=3, damping=0.1)
    figures = optimizer.diagnostics()
    assert figures["num_seen"] == figures["effective_rank"] == 0
    assert figures["gradient_norm"] != figures["gradient_norm"]  # NaN: there was no step yet
    rows = torch.randn(5, 6, dtype=torch.float64)
    for row in rows:
        before = parameter.detach().clone()
        parameter.grad = row.clone()
        optimizer.step()
    step = (before - parameter.detach()) / 0.5
    expected = torch.linalg.solve(0.1 * torch.eye(6, dtype=torch.float64) + rows[2:].T @ rows[2:] / 3, rows[4])
    torch.testing.assert_close(step, expected)
    figures = optimizer.diagnostics()
    shares = torch.linalg.svdvals(rows[2:]).square()
    shares /= shares.sum()
    assert figures["gradient_norm"] == pytest.approx(rows[4].norm().item())
    assert figures["step_norm"] == pytest.approx(expected.norm().item())
    assert figures["cosine"] == pytest.approx(torch.cosine_similarity(rows[4], expected, 0).item())
    assert figures["effective_rank"] == pytest.approx((-shares * shares.log()).sum().exp().item())
    assert figures["num_seen"] == 3
    assert figures["damping"] == 0.1
    assert figures["skipped"] == 0
    assert figures["seconds"] > 0
    assert all(type(value) is float for value in figures.values())


# The longest step, and how often the window is updated.


def test_no_step_is_longer_than_max_step_norm():
    def lengths(**options):
        model = network()
        optimizer = mfac(model.parameters(), lr=0.5, **options)
        before, found = weights(model), []
        for step in range(10):
            train(model, optimizer, [step])
            after = weights(model)
            found.append(torch.stack([(a - b).norm() for a, b in zip(after, before, strict=True)]).norm().item())
            before = after
        return found

    assert max(lengths()) > 0.05
    assert max(lengths(max_step_norm=0.05)) == pytest.approx(0.05, rel=1e-4)
    assert lengths(max_step_norm=1e6) == lengths()

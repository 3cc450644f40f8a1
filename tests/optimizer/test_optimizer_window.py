"""The window of an optimizer: its arguments, damping, memory and figures, and gradients that cannot be used."""

import copy
import math

import pytest
import torch
from optimizers import every_optimizer, full_matrix, loss_of, mask_of, mfac, network, ready, train
from states import same, unchanged, weights
from torch import nn

from mfac import MFAC, MFACPreconditioner


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": float("nan")}, "lr must be 0 or more, and finite, not nan"),
        ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one element, not one of 2"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"nesterov": True}, "nesterov needs a momentum, and momentum is 0; pass one"),
        ({"weight_decay": -1e-3}, "weight_decay must be 0 or more, and finite, not -0.001"),
        ({"num_grads": 0}, "num_grads must be a positive int, not 0"),
        ({"damping": True}, "damping must be positive and finite, not True"),
        ({"damping": 1e-300}, "1e-300 is too small: answers grow to 1/damping, which torch.float32 cannot hold"),
        ({"damping": lambda step: -1.0}, "damping must be"),
        ({"normalize": "none"}, "normalize must be 'seen', 'full' or 'sum', not 'none'"),
        ({"window": torch.int32}, r"rows can be stored in torch.float32, .*, not torch.int32"),
        ({"update_every": True}, "update_every must be a positive int, not True"),
        ({"max_step_norm": 0.0}, "max_step_norm must be positive, or None for steps of any length, not 0.0"),
        ({"max_step_norm": "short"}, "max_step_norm must be positive, .* not 'short'"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'skip', not 'ignore'"),
        ({"precision": "float16"}, "precision must be"),
        ({"momentum_on": "weights"}, "momentum_on must be 'step' or 'gradient'"),
        ({"momentum_on": "gradient", "momentum": 0.5, "update_every": 2}, "every gradient must enter it"),
        ({"betas": (0.9, 1.0)}, r"betas must be at least 0 and below 1, not \(0.9, 1.0\)"),
        ({"betas": 0.9}, r"betas must be two numbers, such as \(0.9, 0.99\)"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas must be two numbers"),
        ({"betas": (0.9, 0.99), "lr": "0.1"}, "lr must be 0 or more, and finite, not '0.1'"),
        ({"betas": (0.9, 0.99), "weight_decay": None}, "weight_decay must be 0 or more, and finite, not None"),
        ({"betas": (0.9, 0.99), "power": "half"}, "power must be 0 or more, and finite, not 'half'"),
        ({"betas": (0.9, 0.99), "power": float("nan")}, "power must be 0 or more, and finite, not nan"),
        ({"betas": (0.9, 0.99), "orthogonalize": "no"}, "orthogonalize must be True or False, not 'no'"),
        ({"betas": (0.9, 0.99), "length": float("inf")}, r"length must be 0 or more, and finite, not inf"),
        ({"betas": (0.9, 0.99), "damping": 0.0}, r"damping must be positive"),
    ],
)
def test_arguments_out_of_their_range(options, words):
    with pytest.raises(ValueError, match=words):
        (full_matrix if "betas" in options else mfac)(network().parameters(), **options)


@every_optimizer
@pytest.mark.parametrize(("steps", "value"), [(0, float("nan")), (8, -float("inf"))])
def test_a_gradient_that_is_not_finite_is_an_error_that_changes_nothing(build, steps, value):
    model, optimizer = ready(build, steps)
    good = model[2].weight.grad[1, 2].clone()
    model[2].weight.grad[1, 2] = value
    message = r"the gradient is not finite.*skip this step"
    with unchanged(model, optimizer), pytest.raises(RuntimeError, match=message):
        optimizer.step()
    model[2].weight.grad[1, 2] = good
    optimizer.step()
    train(model, optimizer, range(steps + 1, steps + 4))
    undisturbed = network()
    train(undisturbed, build(undisturbed.named_parameters()), range(steps + 4))
    assert same(weights(model), weights(undisturbed))


ORDINARY = {
    "squared error of large targets": (1, 1e-3, lambda out: (out[:, 0] - 1000).square().mean()),
    "large inputs": (10, 1e-5, lambda out: (out[:, 0] - 1).square().mean()),
    "a large factor": (1, 1e-3, lambda out: 1e3 * nn.functional.cross_entropy(out, torch.arange(len(out)) % 3)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("problem", ORDINARY)
def test_one_batch_repeated_on_an_ordinary_problem(problem):
    scale, lr, loss = ORDINARY[problem]
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)), scale * torch.randn(64, 20)
        optimizer = MFAC(model.parameters(), lr=lr, num_grads=64)
        for _ in range(4):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        assert optimizer.diagnostics()["raised"] == 0


def steps(optimizer, weight, gradients):
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize(
    "options", [{}, {"update_every": 3}, {"normalize": "seen"}, {"damping": lambda step: 1e-9 / (1 + step)}]
)
def test_a_finite_gradient_beyond_float64_raises_the_damping_for_its_step(options):
    weight = nn.Parameter(torch.zeros(6))
    optimizer, g = MFAC([weight], lr=1.0, num_grads=4, **options), 1e9 * torch.arange(1.0, 7.0)
    message = r"damping=.* too small for gradients of norm 9.54e\+09.*raise the damping"
    with pytest.warns(UserWarning, match=message) as caught:
        steps(optimizer, weight, [g] * 7)
    assert len(caught) == 1
    assert optimizer.diagnostics()["raised"] > 1
    assert -weight @ g > 0.9 * weight.norm() * g.norm()
    assert optimizer.damping == pytest.approx(options["damping"](6) if "damping" in options else 1e-5)
    steps(optimizer, weight, 1e-3 * torch.randn(12, 6))  # the window forgets
    before = optimizer.diagnostics()["raised"]
    steps(optimizer, weight, 1e-3 * torch.randn(3, 6))
    assert optimizer.diagnostics()["raised"] == before


@every_optimizer
def test_gradients_that_are_not_finite_are_skipped_and_counted(build):
    model, optimizer = ready(build, 3, nonfinite="skip")
    for step in range(3, 9):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before = weights(model)
        if step in (4, 5):
            model[0].bias.grad[0] = torch.nan
        optimizer.step()
        assert same(before, weights(model)) is (step in (4, 5))
    assert optimizer.skipped == optimizer.diagnostics()["skipped"] == 2
    other = network()
    train(other, build(other.named_parameters()), [0, 1, 2, 3, 6, 7, 8])
    assert same(weights(model), weights(other))
    fresh = build(other.named_parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.skipped == 2


@pytest.mark.parametrize("window", [None, torch.int8])
@pytest.mark.parametrize(("steps", "method"), [(2, "write"), (8, "write"), (2, "combine"), (8, "combine")])
def test_after_an_interrupted_step_the_window_is_whole_and_goes_on(steps, method, window, monkeypatch):
    model, optimizer = ready(full_matrix, steps, window=window, betas=(0.0, 0.9), power=0.0)  # z is the newest row

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer._window.operator._rows, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    state, before = copy.deepcopy(optimizer.state_dict()), weights(model)
    full_matrix(network().named_parameters(), window=window).load_state_dict(state)  # its rows match its products
    train(model, optimizer, [steps + 1])
    for old, parameter in zip(before, model.parameters(), strict=True):
        expected = old - 1.5 * 0.02 * optimizer.state[parameter]["average"]
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6 if window is None else 1e-3)


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    optimizer = mfac(model.named_parameters())
    model(torch.tensor([1, 2])).sum().backward()
    message = r"0\.weight: sparse gradients are not supported; .*sparse=False"
    for each in (optimizer, MFACPreconditioner(model.named_parameters(), 4)):
        with unchanged(model, each), pytest.raises(RuntimeError, match=message):
            each.step()


@pytest.mark.parametrize("damping", [-1.0, float("inf"), "much"])
def test_a_wrong_damping_is_refused_and_the_old_one_stays(damping):
    model, optimizer = ready(mfac, 6)
    for each in (optimizer, MFACPreconditioner(model.parameters(), 4, 0.5)):
        with unchanged(each), pytest.raises(ValueError, match="damping must be"):
            each.damping = damping


def test_a_schedule_gets_the_number_of_steps_waits_for_finite_gradients_and_ends_when_damping_is_assigned():
    model, asked = network(), []

    def schedule(step):
        asked.append(step)
        return 0.1 * (1 + step)

    optimizer = mfac(model.parameters(), damping=schedule)
    train(model, optimizer, range(4))
    assert asked[1:] == [0, 1, 2, 3]
    assert optimizer.damping == pytest.approx(0.4)
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    model[0].bias.grad[0] = torch.inf
    with unchanged(optimizer), pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    optimizer.damping = 7.0
    train(model, optimizer, [5])
    assert optimizer.damping == 7.0
    optimizer.damping = lambda step: 0.25 * step
    train(model, optimizer, [6])
    assert optimizer.damping == optimizer.state_dict()["state"][0]["window"]["damping"] == 1.25


def held_bytes(optimizer):
    """What the window, its algebra and the momentum hold now."""
    operator = optimizer._window.operator
    tensors = [operator.rows, *(value for value in vars(operator._inverse).values() if isinstance(value, torch.Tensor))]
    tensors += [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("options", [{}, {"window": torch.bfloat16, "momentum": 0.5, "num_grads": 9}], ids=str)
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
    assert needed == MFAC.memory_needed([{"params": layer.parameters()} for layer in (model[0], model[2])], 5)
    assert needed == 5 * 66 * 4 + 4 * 8 * 25
    assert MFAC.memory_needed([{"params": model.parameters(), "momentum": 0.9}], 5) == needed + 66 * 4
    model[0].requires_grad_(False)
    assert MFAC.memory_needed(model.parameters(), 5) == 5 * 24 * 4 + 4 * 8 * 25


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
    with unchanged(optimizer), pytest.raises(MemoryError, match="a window of 100 gradients of 11000 weights"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(10000))})


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1.0), (torch.float32, 1e20), (torch.float32, 1e-17)])
def test_diagnostics_are_those_of_the_step(dtype, scale):
    parameter, damping = torch.randn(6, dtype=dtype).requires_grad_(), 0.1 * scale**2
    optimizer = MFAC([parameter], lr=0.5, num_grads=3, damping=damping, max_step_norm=1.0)
    figures = optimizer.diagnostics()
    assert figures["num_seen"] == figures["effective_rank"] == 0
    assert math.isnan(figures["gradient_norm"])  # there was no step yet
    assert math.isnan(figures["cosine"])
    rows = (scale * torch.randn(5, 6)).double()
    for row in rows:
        parameter.grad, before = row.to(dtype), parameter.detach().clone()
        optimizer.step()
    step = torch.linalg.solve(damping * torch.eye(6, dtype=torch.float64) + rows[2:].T @ rows[2:] / 3, rows[4])
    shares = torch.linalg.svdvals(rows[2:]).square()
    shares /= shares.sum()
    expected = {
        "gradient_norm": rows[4].norm().item(),
        "step_norm": step.norm().item(),
        "cosine": (rows[4] @ step / rows[4].norm() / step.norm()).item(),
        "effective_rank": (-shares * shares.log()).sum().exp().item(),
        "num_seen": 3,
        "damping": damping,
        "skipped": 0,
    }
    figures = optimizer.diagnostics()
    assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=0, rel=1e-4)
    assert (parameter - before).norm().item() == pytest.approx(min(step.norm().item() / 2, 1.0), rel=1e-3, abs=1e-6)
    assert figures["seconds"] > 0
    assert all(type(value) is float for value in figures.values())


def test_no_step_is_longer_than_max_step_norm():
    def lengths(**options):
        model, found = network(), []
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1.0}]
        optimizer = mfac(groups, lr=0.5, **options)
        for step in range(10):
            before = torch.nn.utils.parameters_to_vector(weights(model))
            train(model, optimizer, [step])
            found.append((torch.nn.utils.parameters_to_vector(weights(model)) - before).norm().item())
        return found

    assert max(lengths()) > 0.05
    assert max(lengths(max_step_norm=0.05)) == pytest.approx(0.05, rel=1e-4)
    assert lengths(max_step_norm=1e6) == lengths()


def rows_of(optimizer):
    return torch.cat([entry["rows"].flatten(1) for entry in optimizer.state_dict()["state"].values()], 1)


@pytest.mark.parametrize("normalize", ["full", "seen", "sum"])
@pytest.mark.parametrize("steps", [3, 8])
def test_momentum_on_the_gradient_is_the_inverse_of_the_average(steps, normalize):
    options = {"momentum": 0.7, "momentum_on": "gradient", "normalize": normalize}
    model, optimizer = ready(mfac, steps - 1, model=network().double(), **options)
    before = torch.cat([tensor.flatten() for tensor in weights(model)])
    optimizer.step()
    rows, n = rows_of(optimizer), min(steps, 5)
    divisor = {"full": 5, "seen": n, "sum": 1}[normalize]
    F = 0.1 * torch.eye(rows.shape[1]).double() + rows.T @ rows / divisor
    ages = (steps - 1 - torch.arange(n).double()) % 5
    average = (0.7**ages / (0.7**ages).sum()) @ rows[:n]
    moved = before - 0.02 * torch.linalg.solve(F, average)
    torch.testing.assert_close(torch.cat([tensor.flatten() for tensor in weights(model)]), moved, rtol=1e-9, atol=1e-12)
    assert not any("momentum_buffer" in entry for entry in optimizer.state.values())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_automatic_damping_follows_the_mean_eigenvalue_of_the_window(scale):
    model = network()
    optimizer = mfac(model.parameters(), damping="auto", lr=0.0)
    for step in range(8):
        train(model, optimizer, [step], scale)
        # The mean of the eigenvalues of GᵀG/5 that are not zero.
        mean = rows_of(optimizer)[: step + 1].square().sum(1).mean() / 5
        assert 0.06 < optimizer.damping / mean < 0.17
    optimizer.damping = 0.25
    optimizer.step()
    assert optimizer.damping == 0.25


@pytest.mark.parametrize("momentum_on", ["step", "gradient"])
def test_an_automatic_damping_is_no_smaller_than_its_inverse_can_be_held(momentum_on):
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = MFAC([parameter], 1.0, 4, "auto", momentum=0.5, momentum_on=momentum_on)
    for _ in range(6):
        parameter.grad = torch.tensor([1e-30, -2e-30, 0.0])  # whose squares vanish beside the least damping
        optimizer.step()
    assert 1e-39 < optimizer.damping < 1e-38
    assert torch.equal(parameter.sign(), torch.tensor([-1.0, 1.0, 0.0]))

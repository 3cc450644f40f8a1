"""Wrong arguments, gradients that cannot be used, masks, memory, damping: what is said, and that nothing is lost."""

import copy

import pytest
import torch
from torch import nn

from mfac import MFAC, MFACPreconditioner
from optimizers import OPTIMIZERS, SETTINGS, loss_of, mask_of, mfac, network, same, train, weights

every_optimizer = pytest.mark.parametrize("build", [pytest.param(OPTIMIZERS[name], id=name) for name in OPTIMIZERS])


def ready(build, steps, **options):
    """A model with gradients, and an optimizer that has taken some steps."""
    model = network()
    optimizer = build(model.named_parameters(), **options)
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    loss_of(model, steps).backward()
    return model, optimizer


# Arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr must be 0 or more, not -0.1"),
        ({"lr": float("nan")}, "lr must be 0 or more, not nan"),
        ({"lr": torch.tensor(-1.0)}, "lr must be 0 or more"),
        ({"lr": torch.ones(2)}, "lr must be a number or a tensor of one element, not one of 2"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"momentum": -0.5}, "momentum must be at least 0 and below 1, not -0.5"),
        ({"nesterov": True}, "nesterov looks ahead of a momentum, and momentum is 0; give one"),
        ({"weight_decay": -1e-3}, "weight_decay must be 0 or more, not -0.001"),
        ({"num_grads": 0}, "num_grads must be a positive int, not 0"),
        ({"num_grads": 2.5}, "num_grads must be a positive int, not 2.5"),
        ({"damping": 0.0}, "damping must be"),
        ({"damping": -1.0}, "damping must be"),
        ({"damping": float("nan")}, "damping must be"),
        ({"damping": lambda step: -1.0}, "damping must be"),
        ({"normalize": "none"}, "normalize must be 'seen', 'full' or 'sum', not 'none'"),
        ({"window": torch.int8}, r"rows can be stored in torch.float32, .*, not torch.int8"),
        ({"window": "bfloat16"}, "rows can be stored in .*, not 'bfloat16'"),
        ({"update_every": 0}, "update_every must be a positive int, not 0"),
        ({"update_every": True}, "update_every must be a positive int, not True"),
        ({"max_step_norm": 0.0}, "max_step_norm must be positive, or None for steps of any length, not 0.0"),
        ({"max_step_norm": -1.0}, "max_step_norm must be positive"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'skip', not 'ignore'"),
        ({"precision": "float16"}, "precision must be"),
    ],
)
def test_arguments_out_of_their_range(options, words):
    with pytest.raises(ValueError, match=words):
        mfac(network().parameters(), **options)


def test_there_must_be_something_to_train():
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="none of the parameters is trainable; call requires_grad_"):
        mfac(frozen.parameters())
    with pytest.raises(ValueError, match=r"no trainable parameter to precondition; pass model.parameters"):
        MFACPreconditioner(frozen.parameters())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_refused(dtype):
    parameter = torch.zeros(3, dtype=dtype, requires_grad=True)
    for build in (mfac, MFACPreconditioner):
        with pytest.raises(ValueError, match=rf"w is {dtype}; only real floating-point parameters can be trained"):
            build([("w", parameter)])


# Gradients that cannot be used.


@every_optimizer
@pytest.mark.parametrize(("steps", "value"), [(0, float("nan")), (3, float("inf")), (8, -float("inf"))])
def test_a_gradient_that_is_not_finite_is_an_error_that_changes_nothing(build, steps, value):
    model, optimizer = ready(build, steps)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    good = [parameter.grad.clone() for parameter in model.parameters()]
    model[2].weight.grad[1, 2] = value
    with pytest.raises(RuntimeError, match=r"the gradient is not finite.*skip this step"):
        optimizer.step()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)
    for parameter, gradient in zip(model.parameters(), good, strict=True):
        parameter.grad = gradient
    optimizer.step()
    train(model, optimizer, range(steps + 1, steps + 4))
    undisturbed = network()
    train(undisturbed, build(undisturbed.named_parameters()), range(steps + 4))
    assert same(weights(model), weights(undisturbed))


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
    assert optimizer.skipped == 2
    assert optimizer.diagnostics()["skipped"] == 2
    other = network()
    train(other, build(other.named_parameters()), [0, 1, 2, 3, 6, 7, 8])
    assert same(weights(model), weights(other))
    fresh = build(other.named_parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh.skipped == 2


def test_a_schedule_of_the_damping_waits_for_a_gradient_that_is_finite():
    model, optimizer = ready(mfac, 6, damping=lambda step: 0.1 if step < 6 else 0.5)
    state = copy.deepcopy(optimizer.state_dict())
    model[0].bias.grad[0] = torch.inf
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert optimizer.damping == 0.1
    assert same(optimizer.state_dict(), state)
    model[0].bias.grad[0] = 0.0
    optimizer.step()
    assert optimizer.damping == 0.5


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    optimizer = mfac(model.named_parameters())
    preconditioner = MFACPreconditioner(model.named_parameters(), 4)
    model(torch.tensor([1, 2])).sum().backward()
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients, and 0\.weight has one; .*sparse=False"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"sparse gradients cannot be preconditioned, and 0\.weight has one"):
        preconditioner.step()
    assert same(weights(model), before)
    assert same(optimizer.state_dict(), state)


def test_a_gradient_too_large_for_the_storage_is_not_finite():
    model, optimizer = ready(mfac, 2, window=torch.float16)
    model[0].bias.grad[0] = 1e6
    with pytest.raises(RuntimeError, match=r"squared norm in torch.float16 is inf"):
        optimizer.step()


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


def test_damping_assigned_is_the_damping_used():
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = MFAC([parameter], lr=1.0, num_grads=2, damping=1e3)
    for damping in (1e3, 2e3, 1e4):
        optimizer.damping = damping
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([1.0, -2.0, 0.5, 0.0])
        optimizer.step()
        assert optimizer.damping == damping
        torch.testing.assert_close(before - parameter.detach(), parameter.grad / damping, rtol=1e-2, atol=0)


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


# Masks.


@pytest.mark.parametrize("by", ["name", "parameter"])
def test_masks_by_name_and_by_parameter(by):
    model = network()
    layer = model[0]
    mask = mask_of(layer.weight)
    layer.weight.data.mul_(mask)
    key = "0.weight" if by == "name" else layer.weight
    optimizer = mfac(model.named_parameters(), masks={key: mask})
    train(model, optimizer, range(6))
    assert not layer.weight[~mask].any()
    assert layer.weight[mask].all()


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        (
            lambda model: {"0.wieght": mask_of(model[0].weight)},
            r"'0.wieght' is not a parameter .*; it has 0.weight, 0.bi",
        ),
        (lambda model: {0: mask_of(model[0].weight)}, r"masks: 0 is not a parameter of the optimizer"),
        (lambda model: {torch.ones(2, 2): mask_of(model[0].weight)}, r"a tensor of shape \(2, 2\) is not a parameter"),
        (lambda model: {"0.weight": mask_of(model[2].weight)}, r"'0.weight' needs a bool tensor of shape \(7, 5\)"),
        (
            lambda model: {"0.weight": mask_of(model[0].weight).float()},
            r"needs a bool tensor .* torch.float32 of shape",
        ),
        (lambda model: {"0.weight": [True, False]}, r"'0.weight' needs a bool tensor \(True = kept\), not list"),
        (lambda model: [mask_of(model[0].weight)], r"masks must be \{parameter or name: bool tensor\}, not list"),
        (
            lambda model: {"0.weight": mask_of(model[0].weight)},
            r"0.weight has 12 weights that are not zero where its mask",
        ),
        (
            lambda model: {n: torch.zeros_like(p, dtype=torch.bool) for n, p in model.named_parameters()},
            "masks keep no coordinate at all",
        ),
    ],
)
@pytest.mark.parametrize("build", [mfac, MFACPreconditioner])
def test_wrong_masks(build, masks, words):
    model = network()
    with pytest.raises(ValueError, match=words):
        build(model.named_parameters(), masks=masks(model))


def test_masks_by_name_need_named_parameters():
    model = network()
    with pytest.raises(
        ValueError, match=r"'0.weight' is not a parameter .*; give the optimizer model.named_parameters"
    ):
        mfac(model.parameters(), masks={"0.weight": mask_of(model[0].weight)})


def test_a_mask_that_is_changed_later_is_not_the_optimizer_s():
    model = network()
    mask = mask_of(model[0].weight)
    kept = mask.clone()
    model[0].weight.data.mul_(mask)
    optimizer = mfac(model.named_parameters(), masks={"0.weight": mask})
    mask.fill_(True)
    train(model, optimizer, range(3))
    assert torch.equal(optimizer.state_dict()["state"][0]["mask"], kept)
    assert not model[0].weight[~kept].any()


def test_a_mask_of_a_frozen_parameter_counts_once_it_is_thawed():
    model = network()
    mask = mask_of(model[0].weight)
    model[0].weight.data.mul_(mask)
    model[0].weight.requires_grad_(False)
    optimizer = mfac(model.named_parameters(), masks={"0.weight": mask})
    train(model, optimizer, range(3))
    model[0].weight.requires_grad_(True)
    before = weights(model)
    train(model, optimizer, range(3, 6))
    assert not model[0].weight[~mask].any()
    assert (model[0].weight != before[0])[mask].all()


def test_a_parameter_that_is_pruned_altogether_stays_zero():
    model = network()
    model[2].bias.data.zero_()
    optimizer = mfac(model.named_parameters(), masks={"2.bias": torch.zeros(3, dtype=torch.bool)}, momentum=0.9)
    train(model, optimizer, range(7))
    assert not model[2].bias.any()
    fresh = mfac(model.named_parameters(), masks={"2.bias": torch.zeros(3, dtype=torch.bool)}, momentum=0.9)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


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
    monkeypatch.setattr("mfac.dynamic.available_memory", lambda device: 2**20)
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


def test_effective_rank_counts_directions():
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = MFAC([parameter], **SETTINGS)
    parameter.grad = torch.zeros(4)
    optimizer.step()
    assert optimizer.diagnostics()["effective_rank"] == 0
    for direction in torch.eye(4):
        parameter.grad = 2 * direction
        optimizer.step()
    assert optimizer.diagnostics()["effective_rank"] == pytest.approx(4)


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


def test_only_every_so_many_gradients_enter_the_window():
    model = network()
    optimizer = mfac(model.parameters(), num_grads=8, update_every=3)
    seen = []
    for step in range(8):
        train(model, optimizer, [step])
        seen.append(optimizer.diagnostics()["num_seen"])
    assert seen == [1, 1, 1, 2, 2, 2, 3, 3]


# The preconditioner, where it differs from the optimizer.


def test_a_preconditioner_leaves_gradients_alone_when_it_does_nothing():
    model = network()
    preconditioner = MFACPreconditioner(model.parameters(), 4, nonfinite="skip")
    assert not preconditioner.step()
    loss_of(model, 0).backward()
    model[0].bias.grad[0] = torch.nan
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    assert not preconditioner.step()
    assert preconditioner.skipped == 1
    assert all(torch.equal(p.grad.nan_to_num(), g.nan_to_num()) for p, g in zip(model.parameters(), grads, strict=True))
    strict = MFACPreconditioner(model.parameters(), 4)
    with pytest.raises(RuntimeError, match="the gradient is not finite"):
        strict.step()


def test_a_preconditioner_keeps_what_is_none_and_takes_groups():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    preconditioner = MFACPreconditioner(groups, 4, 0.1)
    loss_of(model, 0).backward()
    model[2].bias.grad = None
    before = [parameter.grad for parameter in model.parameters()]
    copies = [None if gradient is None else gradient.clone() for gradient in before]
    assert preconditioner.step()
    assert model[2].bias.grad is None
    for parameter, gradient, old in zip(model.parameters(), before, copies, strict=True):
        assert parameter.grad is gradient  # in place
        assert gradient is None or not torch.equal(gradient, old)


def test_what_is_no_list_of_parameters_is_refused_by_the_preconditioner():
    with pytest.raises(TypeError, match="an iterable of Tensors or dicts"):
        MFACPreconditioner(network()[0].weight)
    with pytest.raises(ValueError, match="empty parameter list"):
        MFACPreconditioner([])

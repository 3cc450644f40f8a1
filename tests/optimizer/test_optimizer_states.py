"""States of optimizers: saved in every way, loaded, and resumed bit for bit; states of something else are refused."""

import copy

import oracle
import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizers import every_optimizer, every_storage, full_matrix, mask_of, masked, mfac, network, train, trained
from states import same, through_a_file, unchanged, weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from mfac import Int8, TopK


def resumed(build, model, state, **options):
    twin = copy.deepcopy(model)
    optimizer = build(twin.named_parameters(), **options)
    optimizer.load_state_dict(state)
    return twin, optimizer


def assert_same_course(one, other, steps):
    for pair in (one, other):
        train(*pair, steps)
    assert same(weights(one[0]), weights(other[0]))
    assert same(one[1].state_dict(), other[1].state_dict())


@every_optimizer
@pytest.mark.parametrize("steps", [0, 4, 9])
def test_saved_and_loaded_it_continues_bit_for_bit(build, steps):
    model, optimizer = trained(build, steps)
    state = through_a_file(optimizer.state_dict())
    kept = copy.deepcopy(state)
    twin, fresh = resumed(build, model, state)
    used = resumed(build, model, state)
    train(*used, range(50, 53))  # loading replaces whatever was there
    used[0].load_state_dict(model.state_dict())
    used[1].load_state_dict(state)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert_same_course((model, optimizer), (twin, fresh), range(steps, steps + 6))
    train(*used, range(steps, steps + 6))
    assert same(weights(used[0]), weights(model))
    assert same(state, kept)  # it was copied
    unsaved = optimizer.state_dict()
    train(model, optimizer, range(8))
    with pytest.raises(ValueError, match=r"updated after state_dict\(\).*save or deep-copy it"):
        resumed(build, model, unsaved)


def test_stopped_after_any_step_it_continues_bit_for_bit():
    """Through the wrap-around, new factorisations after 64 updates, and a damping that is assigned."""
    model, options = network().double(), {"damping": 1e-3, "momentum": 0.5, "weight_decay": 1e-3}
    twin = copy.deepcopy(model)
    optimizer = mfac(model.parameters(), **options)
    for step in range(80):
        fresh = mfac(twin.parameters(), **options)
        fresh.load_state_dict(through_a_file(optimizer.state_dict()))
        for pair in ((model, optimizer), (twin, fresh)):
            train(*pair, [step])
            if step == 40:
                pair[1].damping = 2e-3
        assert same(weights(twin), weights(model)), f"step {step}"


def test_a_state_with_options_missing_steps_as_tensors_and_entries_of_others():
    model, optimizer = trained(mfac, 6, lr=0.125, momentum=0.25)
    optimizer.damping = 0.5
    optimizer.state[model[0].weight]["note"] = torch.ones(2)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = torch.tensor(float(entry["step"]))
    for name in ("maximize", "nesterov", "decoupled_weight_decay"):
        del state["param_groups"][0][name]
    twin, fresh = resumed(mfac, model, state)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"], fresh.damping) == (0.125, 0.25, 0.5)
    train(twin, fresh, [6])
    assert fresh.state[twin[0].weight]["step"] == 7
    assert torch.equal(fresh.state[twin[0].weight]["note"], torch.ones(2))
    fresh.state.clear()
    train(twin, fresh, [7])
    assert fresh.state[twin[0].weight]["step"] == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_state_of_fewer_or_of_more_parameters_than_are_trained_here(there):
    """What was frozen when it was saved has had zero gradients; what is frozen here widens the window."""
    model = network()
    if there:
        model[0].requires_grad_(False)
    _, optimizer = trained(mfac, 7, model, momentum=0.9)
    state, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model).requires_grad_(True)
    if not there:
        twin[2].requires_grad_(False)
    fresh = mfac(twin.named_parameters(), momentum=0.9)
    fresh.load_state_dict(state)
    for each in (model, twin):
        each.requires_grad_(True)
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(7, 12))
    torch.testing.assert_close(weights(twin), weights(model))


def test_momentum_of_parameters_in_bfloat16_is_not_rounded():
    model = network().bfloat16()
    _, optimizer = trained(mfac, 6, model, momentum=0.9)
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype == torch.float32
    _, fresh = resumed(mfac, model, through_a_file(optimizer.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


# torch.distributed.checkpoint, without a process group.


@every_storage
@pytest.mark.parametrize("named", [None, False, True], ids=["plain", "by name", "by name in full"])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_distributed_checkpoints(build, named, tmp_path):
    options = StateDictOptions(full_state_dict=bool(named))

    def state_of(model, optimizer):
        return optimizer.state_dict() if named is None else get_optimizer_state_dict(model, optimizer, options=options)

    model, optimizer = trained(build, 8)
    dcp.save({"optimizer": state_of(model, optimizer)}, checkpoint_id=tmp_path)
    twin = copy.deepcopy(model)
    fresh = build(twin.named_parameters())
    state = {"optimizer": state_of(twin, fresh)}
    dcp.load(state, checkpoint_id=tmp_path)
    if named is None:
        fresh.load_state_dict(state["optimizer"])
    else:
        assert state["optimizer"]["state"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
        set_optimizer_state_dict(twin, fresh, state["optimizer"], options=options)
    assert_same_course((model, optimizer), (twin, fresh), range(8, 14))


OTHERS = {
    "order": (lambda model: mfac(list(model.parameters())[::-1]),
              r"gradients of shape \[3\] for 0.weight, which is \[7, 5\] here; .*parameters in another order"),
    "names": (lambda model: mfac([(name[::-1], tensor) for name, tensor in model.named_parameters()]),
              "saved with 'thgiew.0' where this optimizer has '0.weight'; pass the parameters in the same order"),
    "mask": (lambda model: masked(model.parameters()), "saved with another mask of 0.weight; build the optimizer with"),
    "groups": (lambda model: mfac([{"params": model[0].weight}, {"params": model[0].bias}]),
               r"groups of \[1, 1\] parameters, .* has groups of \[4\]; build it"),
    "FullMatrixAdam": (lambda model: full_matrix(model.parameters()), "another class of optimizer saved this state"),
    "Adam": (lambda model: torch.optim.Adam(model.parameters()), "no window of gradients, so another optimizer saved"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_something_else_is_refused_and_nothing_changes(other):
    build, words = OTHERS[other]
    stranger = build(network())
    for tensor in stranger.param_groups[0]["params"]:
        tensor.grad = torch.ones_like(tensor)
    stranger.step()
    model, optimizer = trained(mfac, 6, momentum=0.9)
    with unchanged(optimizer), pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(copy.deepcopy(stranger.state_dict()))
    with unchanged(optimizer), pytest.raises(ValueError, match="this state has no window of gradients"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    train(model, optimizer, range(6, 9))
    assert same(weights(model), weights(trained(mfac, 9, momentum=0.9)[0]))


def test_a_state_with_no_mask_or_another_one_is_refused():
    model = network()
    mask = mask_of(model[0].weight).flip(1)
    model[0].weight.data.mul_(mask)
    for kind, masks in (("no", None), ("another", {"0.weight": mask})):
        state = mfac(model.named_parameters(), masks=masks).state_dict()
        words = f"saved with {kind} mask of 0.weight; build the optimizer with the same masks"
        with pytest.raises(ValueError, match=words):
            masked(network().named_parameters()).load_state_dict(state)


@every_storage
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"calls": -1}, "the saved calls must be an int of 0 or more, not -1"),
        ({"gram": torch.zeros(2, 2)}, "the saved gram must be a tensor"),
        ({"num_grads": 3}, "num_grads=3"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(build, damage, message):
    _, optimizer = trained(build, 9)
    state = copy.deepcopy(optimizer.state_dict())
    next(entry for entry in [state, *state["state"].values()] if "window" in entry)["window"].update(damage)
    with unchanged(optimizer), pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)


KINDS = {"float64": torch.float64, "bfloat16": torch.bfloat16, "int8": Int8(block=16), "top-k": TopK(0.4, block=8)}


@pytest.mark.parametrize(
    ("there", "here"), [("float64", "bfloat16"), ("int8", "int8"), ("top-k", "top-k"), ("top-k", "int8")]
)
def test_a_state_in_another_order_of_columns_and_another_storage(there, here):
    """Parameters that get their first gradient late are at the end of the window; built with them, they are not."""
    model = network()
    model[0].weight.requires_grad_(False)
    _, optimizer = trained(mfac, 4, model, window=KINDS[there])
    model[0].weight.requires_grad_(True)
    train(model, optimizer, range(4, 9))
    _, fresh = resumed(mfac, network(), copy.deepcopy(optimizer.state_dict()), window=KINDS[here])
    operator, saved = fresh._window.operator, optimizer._window.operator.rows.float()
    rows, expected = operator.rows.float(), torch.cat((saved[:, 31:], saved[:, :31]), dim=1)
    kept = rows != 0  # other blocks: one may have more entries than top-k keeps
    assert torch.allclose(rows[kept], expected[kept], rtol=0, atol=2 * float(saved.abs().max()) / 127)
    assert kept.sum() > 0.8 * (expected != 0).sum()
    dense, _ = oracle.inverse(oracle.fisher(rows, 0.1))
    x = torch.randn(rows.shape[1])
    assert oracle.error(operator @ x, dense @ oracle.wide(x)) < 1e-4

"""States of optimizers: saved in every way that people have, loaded, and gone on with bit for bit."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizers import (
    every_optimizer,
    mfac,
    network,
    same,
    some_optimizers,
    through_a_file,
    train,
    trained_by_name,
    weights,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def resumed(build, model, state, **options):
    twin = copy.deepcopy(model)
    optimizer = build(twin.named_parameters(), **options)
    optimizer.load_state_dict(state)
    return twin, optimizer


# The run goes on as if it had not stopped.


@every_optimizer
@pytest.mark.parametrize("steps", [0, 4, 9])
def test_saved_and_loaded_into_a_fresh_one_it_goes_on_bit_for_bit(build, steps):
    model, optimizer = trained_by_name(build, steps)
    state = through_a_file(optimizer.state_dict())
    twin, fresh = resumed(build, model, state)
    assert same(fresh.state_dict(), optimizer.state_dict())
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(steps, steps + 6))
    assert same(weights(twin), weights(model))
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("options", [{}, {"update_every": 3}], ids=str)
def test_stopped_after_any_step_it_goes_on_bit_for_bit(options):
    """Through the wrap-around, new factorisations after 64 updates, and a damping that is assigned."""
    model = network().double()
    twin = copy.deepcopy(model)
    optimizer = mfac(model.parameters(), damping=1e-3, momentum=0.5, **options)
    for step in range(90):
        fresh = mfac(twin.parameters(), damping=1e-3, momentum=0.5, **options)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for pair in ((model, optimizer), (twin, fresh)):
            train(*pair, [step])
            if step == 40:
                pair[1].damping = 2e-3
        assert same(weights(twin), weights(model)), f"step {step}"
        if step == 40:
            fresh.damping = 2e-3


@some_optimizers
def test_loading_goes_over_whatever_was_there(build):
    model, optimizer = trained_by_name(build, 6)
    state = copy.deepcopy(optimizer.state_dict())
    start = weights(model)
    train(model, optimizer, range(6, 11))
    expected = weights(model)
    for old, parameter in zip(start, model.parameters(), strict=True):
        parameter.data.copy_(old)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(6, 11))
    assert same(weights(model), expected)


@some_optimizers
def test_a_loaded_state_is_a_copy(build):
    model, optimizer = trained_by_name(build, 6)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    twin, fresh = resumed(build, model, state)
    train(twin, fresh, range(6, 12))
    assert same(state, kept)


def test_a_state_that_went_on_before_it_was_saved_is_refused():
    model, optimizer = trained_by_name(mfac, 6)
    state = optimizer.state_dict()
    train(model, optimizer, range(6, 8))
    with pytest.raises(ValueError, match=r"updated after state_dict\(\).*save the state, or deep-copy it"):
        resumed(mfac, model, state)


def test_options_of_groups_come_from_the_state_as_with_any_optimizer():
    model, optimizer = trained_by_name(mfac, 3, lr=0.125, momentum=0.25)
    _, fresh = resumed(mfac, model, optimizer.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.125
    assert fresh.param_groups[0]["momentum"] == 0.25
    optimizer.damping = 0.5
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.damping == 0.5


def test_a_state_of_before_an_option_was_there_can_be_loaded():
    model, optimizer = trained_by_name(mfac, 6)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        for name in ("maximize", "nesterov", "decoupled_weight_decay"):
            del group[name]
    twin, fresh = resumed(mfac, model, state)
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(6, 9))
    assert same(weights(twin), weights(model))


def test_steps_may_be_tensors_and_other_entries_are_kept():
    model, optimizer = trained_by_name(mfac, 6)
    optimizer.state[model[0].weight]["note"] = torch.ones(2)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"] = torch.tensor(float(entry["step"]))
    twin, fresh = resumed(mfac, model, state)
    train(twin, fresh, [6])
    assert fresh.state[twin[0].weight]["step"] == 7
    assert torch.equal(fresh.state[twin[0].weight]["note"], torch.ones(2))


def test_a_state_that_someone_cleared_begins_again():
    model, optimizer = trained_by_name(mfac, 6, momentum=0.9)
    optimizer.state.clear()
    train(model, optimizer, [6])
    assert optimizer.state[model[0].weight]["step"] == 1
    optimizer.state.clear()
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2, 3}


def test_a_state_of_a_few_thawed_parameters_is_loaded_into_more():
    """What was frozen when it was saved has had zero gradients."""
    model = network()
    model[0].requires_grad_(False)
    _, optimizer = trained_by_name(mfac, 7, model, momentum=0.9)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"].keys() == {2, 3}
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.requires_grad_(True)
    fresh = mfac(twin.named_parameters(), momentum=0.9)
    fresh.load_state_dict(state)
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(7, 12))
    torch.testing.assert_close(weights(twin), weights(model))


def test_a_state_of_more_parameters_than_are_trained_here_widens_the_window():
    model, optimizer = trained_by_name(mfac, 7, momentum=0.9)
    twin = copy.deepcopy(model)
    twin[2].requires_grad_(False)
    fresh = mfac(twin.named_parameters(), momentum=0.9)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.requires_grad_(True)
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(7, 12))
    torch.testing.assert_close(weights(twin), weights(model))


# Other storages.


@pytest.mark.parametrize(("there", "here"), [(torch.bfloat16, None), (None, torch.bfloat16), (torch.float64, None)])
def test_a_window_stored_otherwise_is_converted(there, here):
    """Equal to a run whose window had those rows."""
    model, optimizer = trained_by_name(mfac, 8, window=there)
    state = copy.deepcopy(optimizer.state_dict())
    twin, fresh = resumed(mfac, model, state, window=here)
    dtype = torch.float32 if here is None else here
    converted = fresh.state_dict()["state"]
    for i, entry in state["state"].items():
        assert torch.equal(converted[i]["rows"], entry["rows"].to(dtype))
    rows = torch.cat([entry["rows"].flatten(1) for entry in converted.values()], 1).double()
    torch.testing.assert_close(converted[0]["window"]["gram"], rows @ rows.T, rtol=1e-5, atol=1e-8)
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(8, 10))
    torch.testing.assert_close(weights(twin), weights(model), rtol=0.05, atol=2e-3)


def test_a_smaller_storage_where_the_first_parameter_has_no_rows_yet():
    model = network()
    model[0].requires_grad_(False)
    _, optimizer = trained_by_name(mfac, 7, model)
    state = copy.deepcopy(optimizer.state_dict())
    model.requires_grad_(True)
    _, fresh = resumed(mfac, model, state, window=torch.bfloat16)
    entries = fresh.state_dict()["state"]
    rows = torch.cat([entry["rows"].flatten(1) for entry in entries.values()], 1).double()
    torch.testing.assert_close(entries[0]["window"]["gram"], rows @ rows.T, rtol=1e-12, atol=1e-12)


def test_momentum_of_parameters_in_bfloat16_is_not_rounded():
    model = network().bfloat16()
    _, optimizer = trained_by_name(mfac, 6, model, momentum=0.9)
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype == torch.float32
    _, fresh = resumed(mfac, model, through_a_file(optimizer.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


# torch.distributed.checkpoint, without a process group.


@every_optimizer
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_distributed_checkpoints_of_the_plain_state(build, tmp_path):
    model, optimizer = trained_by_name(build, 8)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    twin = network()
    fresh = build(twin.named_parameters())
    state = {"model": twin.state_dict(), "optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    twin.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(8, 14))
    assert same(weights(twin), weights(model))
    assert same(fresh.state_dict(), optimizer.state_dict())


@some_optimizers
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_distributed_checkpoints_of_the_state_by_name(build, tmp_path):
    model, optimizer = trained_by_name(build, 8)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    twin = copy.deepcopy(model)
    fresh = build(twin.named_parameters())
    state = {"optimizer": get_optimizer_state_dict(twin, fresh)}
    assert state["optimizer"]["state"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(twin, fresh, state["optimizer"])
    for pair in ((model, optimizer), (twin, fresh)):
        train(*pair, range(8, 14))
    assert same(weights(twin), weights(model))

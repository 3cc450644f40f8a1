"""States of an optimizer on ranks: saved on some, loaded on others, and gone on with as if nothing had happened."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_cases import Training, load_state, save_state
from rank_pool import on_ranks
from states import through_a_file
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException

from mfac import Int8, TopK

SAVED, MORE = 10, 6  # steps: past the first wrap-around, and some after it
OPTIONS = {"momentum": 0.9, "weight_decay": 0.01, "masked": True}


def save(group, way, folder, options):
    training = Training(group, way, **options).steps(range(SAVED))
    save_state(training, folder)
    return training.weights()


def load_and_go_on(group, ways, folders, options):
    """Weights after some more steps, by the way and the folder it was loaded from."""
    results = {}
    for way in ways:
        for folder in folders:
            training = Training(group, way, **options)
            load_state(training, folder)
            results[way, folder] = training.steps(range(SAVED, SAVED + MORE)).weights()
    return results


@pytest.fixture(scope="module")
def folders(rank_pool, tmp_path_factory):
    """Checkpoints of every way of training, on some numbers of ranks."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}
    for way, size in (("ddp", 2), ("fsdp", 4)):
        made[way, size] = str(root / f"{way}-{size}")
        rank_pool.run(size, save, way, made[way, size], OPTIONS)
    made["alone", 1] = str(root / "alone")
    save(None, "ddp", made["alone", 1], OPTIONS)
    return made


@pytest.fixture(scope="module")
def expected():
    return Training(None, "ddp", **OPTIONS).steps(range(SAVED + MORE)).weights()


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_saved_on_any_ranks_it_goes_on_on_any_other_or_without_a_group(rank_pool, folders, expected, size):
    """From DDP to FSDP2 and back too."""
    given = ["ddp", "fsdp"] if size else ["ddp"], list(folders.values()), OPTIONS
    for results in rank_pool.run(size, load_and_go_on, *given) if size else [load_and_go_on(None, *given)]:
        assert len(results) == len(given[0]) * len(folders)
        for weights in results.values():
            torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("way", "window"),
    [("ddp", None), ("fsdp", None), ("ddp", torch.bfloat16), ("ddp", TopK(0.5, block=8)), ("fsdp", Int8(block=8))],
    ids=str,
)
@on_ranks(3)
def test_every_rank_resumes_from_its_own_file_bit_for_bit(group, way, window):
    """Both runs get the same gradients: DDP sums in another order after its first step."""
    options = {"momentum": 0.9, "masked": window is None, "window": window, "dtype": torch.float32}
    training = Training(group, way, **options).steps(range(SAVED))
    twin = Training(group, way, **options)
    twin.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
    # Columns of masked shards are uneven, which torch has a class for that it does not load unasked.
    trusted = training.placed and options["masked"]
    twin.optimizer.load_state_dict(through_a_file(training.optimizer.state_dict(), not trusted))
    for step in range(SAVED, SAVED + MORE):
        training.backward(step)
        for ours, theirs in zip(twin.model.parameters(), training.model.parameters(), strict=True):
            ours.grad = theirs.grad.clone()
        training.optimizer.step()
        twin.optimizer.step()
    assert all(map(torch.equal, training.weights(), twin.weights()))


@pytest.mark.parametrize(
    ("way", "window"), [("ddp", None), ("fsdp", None), ("fsdp", Int8(block=8)), ("ddp", TopK(1.0, block=8))], ids=str
)
@on_ranks(3)
def test_the_state_of_one_process_is_loaded_on_ranks(group, way, window):
    """Exactly where rows are a matrix; compressed ones are compressed anew, in blocks of each rank's columns."""
    options = {"momentum": 0.9, "masked": True, "window": window}
    training, whole = Training(group, way, **options), Training(None, "ddp", **options).steps(range(SAVED))
    if training.placed:
        full = state_dict.StateDictOptions(full_state_dict=True)
        state_dict.set_model_state_dict(training.model, whole.model.state_dict(), options=full)
    else:
        training.model.load_state_dict(whole.model.state_dict())
    training.optimizer.load_state_dict(through_a_file(whole.optimizer.state_dict()))
    weights, expected = (each.steps(range(SAVED, SAVED + MORE)).weights() for each in (training, whole))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if window is None else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(weights, expected, **tolerance)


@pytest.mark.parametrize(("window", "words"), [(None, "sharded for other ranks"), (torch.int8, "cannot be resharded")])
@on_ranks(2)
def test_the_state_of_another_rank_is_refused(group, window, words):
    """As trainers would load it that save on the first rank only."""
    training = Training(group, "ddp", window=window).steps(range(SAVED))
    told = [training.optimizer.state_dict()]
    dist.broadcast_object_list(told, 0, group=group)
    with pytest.raises(ValueError, match=words):
        training.optimizer.load_state_dict(told[0])


def compressed_elsewhere(group, folder, options, save_it):
    training = Training(group, "ddp", **options).steps(range(SAVED if save_it else 0))
    state = {"optimizer": training.optimizer.state_dict()}
    if save_it:
        dcp.save(state, checkpoint_id=folder, process_group=group)
        return training.operator.rows.clone()
    try:
        dcp.load(state, checkpoint_id=folder, process_group=group)
    except CheckpointException as error:
        return str(error)
    training.optimizer.load_state_dict(state["optimizer"])
    return training.operator.rows


def test_compressed_rows_can_be_loaded_on_as_many_ranks_only(rank_pool, tmp_path):
    options = {"window": TopK(0.5, block=8)}
    saved = rank_pool.run(2, compressed_elsewhere, str(tmp_path), options, True)
    assert not torch.equal(*saved)
    assert all(map(torch.equal, rank_pool.run(2, compressed_elsewhere, str(tmp_path), options, False), saved))
    for message in rank_pool.run(3, compressed_elsewhere, str(tmp_path), options, False):
        assert "Missing key in checkpoint" in message
        assert "of 3" in message


@on_ranks(2)
def test_a_full_state_of_sharded_parameters_loads_again_and_shares_are_not_taken_for_the_whole(group):
    """A whole state on every rank, as get_optimizer_state_dict gathers it."""
    training, twin = Training(group, "fsdp", momentum=0.9).steps(range(SAVED)), Training(group, "fsdp", momentum=0.9)
    with pytest.raises(ValueError, match=r"the saved state of 0.weight is sharded over 2 ranks; save and load it with"):
        Training(None, "ddp").optimizer.load_state_dict(Training(group, "fsdp").steps(range(1)).optimizer.state_dict())
    options = state_dict.StateDictOptions(full_state_dict=True)
    state = state_dict.get_optimizer_state_dict(training.model, training.optimizer, options=options)
    assert state["state"]["0.weight"]["rows"].shape == (8, 7, 5)
    twin.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
    state_dict.set_optimizer_state_dict(twin.model, twin.optimizer, state, options=options)
    weights, resumed = (each.steps(range(SAVED, SAVED + MORE)).weights() for each in (training, twin))
    torch.testing.assert_close(resumed, weights, rtol=1e-12, atol=1e-13)

"""GradualPruner: through the schedule, with masks that hold in training, and the same after any interruption."""

import copy

import pytest
import torch
from models import cross_entropy, failing_loss, mlp
from pruning_cases import zeros
from run_cases import data, network
from states import same, state_of, unchanged
from torch.utils.data import DataLoader, TensorDataset

from mfac.pruning.gradual import GradualPruner
from mfac.pruning.prune import prune
from mfac.pruning.schedules import geometric_schedule

SCHEDULE = geometric_schedule(0, 0.9, 4)
SMALL = {"update": "joint", "num_grads": 6, "block_size": 16, "recomputations": 2}


def test_each_step_goes_to_the_next_sparsity_and_none_follows_the_last():
    case = mlp(24)
    asked = []

    def of_step(step):
        asked.append(step)
        return case.batches(2)

    pruner = GradualPruner(case.model, case.loss_fn, of_step, [0.25, 0.5, 0.75], method="magnitude", **SMALL)
    for index, sparsity in enumerate([0.25, 0.5, 0.75]):
        assert pruner.next_sparsity == sparsity
        result = pruner.step()
        assert result.sparsity == round(sparsity * 56) / 56
        assert zeros(case.model) == round(sparsity * 56)
        assert same(pruner.masks, result.masks)
        assert pruner.steps_done == index + 1
    assert pruner.next_sparsity is None
    with unchanged(case.model):
        assert pruner.step() is None
    assert [len(records) for records in pruner.history] == [2, 2, 2]
    assert asked == [0, 1, 2]


def test_a_step_is_a_call_of_prune_whatever_the_global_random_state():
    case, twin = mlp(24), mlp(24)
    loader = DataLoader(TensorDataset(*case.batch), batch_size=4, shuffle=True)
    pruner = GradualPruner(case.model, case.loss_fn, loader, [0.3, 0.6], seed=5, **SMALL)
    masks = None
    for index, sparsity in enumerate([0.3, 0.6]):
        before = torch.get_rng_state()
        pruner.step()
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        masks = prune(twin.model, twin.loss_fn, loader, sparsity, masks=masks, seed=5 + index, **SMALL).masks
        assert same(state_of(case.model), state_of(twin.model))
    assert same(pruner.masks, masks)


def build(loss_fn=cross_entropy):
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    loader = DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(7))
    options = {"num_grads": 8, "block_size": 16, "recomputations": 2}
    return model, optimizer, GradualPruner(model, loss_fn, loader, SCHEDULE, optimizer=optimizer, **options)


def train(model, optimizer, seed, loss_fn):
    model.train()
    for batch in DataLoader(data(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # dropout draws from the global random state
        optimizer.step()


def test_momentum_is_reset_on_request():
    case = mlp(24)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    for reset in (False, True):
        options = {"optimizer": optimizer, "reset_momentum": reset} | SMALL
        pruner = GradualPruner(case.model, case.loss_fn, case.batches(2), [0.5 + 0.1 * reset], **options)
        case.loss_fn(case.model, case.batch).backward()
        optimizer.step()
        pruner.step()
        assert any(s["momentum_buffer"].count_nonzero() for s in optimizer.state.values()) == (not reset)


def test_masks_to_begin_with_stay_and_count():
    case = mlp(24)
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[:3] = False
    options = {"masks": {"module.0.weight": mask.float()}} | SMALL
    pruner = GradualPruner(case.model, case.loss_fn, case.batches(2), [0.5], **options)
    assert zeros(case.model) == 15
    assert not (pruner.step().masks["0.weight"] & ~mask).any()
    assert zeros(case.model) == 28


def test_a_step_that_fails_midway_leaves_what_is_complete_and_can_be_called_again():
    case = mlp(24)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)

    def stop(result):
        if len(result.history) == 2:
            raise KeyboardInterrupt

    options = SMALL | {"recomputations": 4, "optimizer": optimizer}
    pruner = GradualPruner(case.model, case.loss_fn, case.batches(2), [0.8], on_step=stop, **options)
    with pytest.raises(KeyboardInterrupt):
        pruner.step()
    expected = round(56 * 0.2**0.5)
    assert zeros(case.model) == 56 - expected == 56 - sum(int(mask.sum()) for mask in pruner.masks.values())
    assert pruner.steps_done == 0
    case.loss_fn(case.model, case.batch).backward()
    optimizer.step()  # training holds them too
    assert zeros(case.model) == 56 - expected
    pruner = GradualPruner(case.model, case.loss_fn, case.batches(2), [0.8], masks=pruner.masks, **SMALL)
    assert pruner.step().sparsity == round(0.8 * 56) / 56


def test_an_optimizer_of_other_weights_and_no_seed():
    case = mlp()
    for options, message in (
        ({"optimizer": torch.optim.SGD(mlp().model.parameters())}, "none of the 2 weights to prune is in the"),
        ({"seed": None}, "seed must be an int, which a resumed run needs, not None"),
        ({"targets": "0.wait"}, "'0.wait' matches no parameter"),
    ):
        with unchanged(case.model), pytest.raises(ValueError, match=message):
            GradualPruner(case.model, case.loss_fn, [case.batch], [0.5], **options)


def test_a_copy_keeps_its_own_zeros():
    case = mlp()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, weight_decay=0.1)
    pruner = GradualPruner(case.model, case.loss_fn, [case.batch], [0.5, 0.8], optimizer=optimizer, **SMALL)
    pruner.step()
    model, own, twin = copy.deepcopy((case.model, optimizer, pruner))
    with unchanged(case.model):
        cross_entropy(model, case.batch).backward()
        own.step()
        assert zeros(model) == 28
        assert zeros(case.model) == 28
        twin.step()
        assert zeros(model) == round(0.8 * 56)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": [0.5]}, r"saved with schedule \[0.5\], this pruner has .*build it with the same"),
        ({"seed": 3}, "saved with seed 3, this pruner has 0"),
        ({"masks": {"zzz": torch.ones(2, 2).bool()}}, "'zzz' matches no parameter of the model"),
        ({"steps_done": 99}, "the saved steps_done must be an int from 0 to [0-9], not 99"),
        ({"history": [[{"lost": 1}]]}, "the state of the pruner is damaged"),
        ({"generators": [None]}, "the state of the pruner is damaged"),
    ],
)
def test_states_of_something_else(change, message):
    model, _, pruner = build()
    with unchanged(model), pytest.raises(ValueError, match=message):
        pruner.load_state_dict(pruner.state_dict() | change)
    message = "the state of the pruner is damaged, or of another kind: 'schedule' is missing"
    with unchanged(model), pytest.raises(ValueError, match=message):
        pruner.load_state_dict({"steps_done": 1, "seed": 0})
    assert pruner.steps_done == 0


def run(path, loss_fn=cross_entropy):
    """Goes on from the last checkpoint, if there is one."""
    model, optimizer, pruner = build(loss_fn)
    parts = {"pruner": pruner, "model": model, "optimizer": optimizer}
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():  # in any order
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
    while pruner.step() is not None:
        train(model, optimizer, pruner.steps_done, loss_fn)
        assert zeros(model) == round(SCHEDULE[pruner.steps_done - 1] * (8 * 16 + 16 * 4))
        for parameter, mask in ((model.get_parameter(name), mask) for name, mask in pruner.masks.items()):
            assert not parameter[~mask].any()
            assert not optimizer.state[parameter]["momentum_buffer"][~mask].any()
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save(states | {"random": torch.get_rng_state()}, path)
    return parts


def test_masks_hold_in_training_and_stopped_in_mid_schedule_it_ends_as_undisturbed(tmp_path):
    path = tmp_path / "checkpoint.pt"
    whole = run(path)
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        run(path, failing_loss(100, KeyboardInterrupt()))  # in the middle of a pruning step
    assert 1 <= torch.load(path, weights_only=True)["pruner"]["steps_done"] < len(SCHEDULE)
    resumed = run(path)
    assert same(resumed["pruner"].masks, whole["pruner"].masks)
    assert same(resumed["model"].state_dict(), whole["model"].state_dict())
    buffers = [[s["momentum_buffer"] for s in end["optimizer"].state.values()] for end in (whole, resumed)]
    assert all(map(torch.equal, *buffers))
    removed = [[[record.removed for record in step] for step in end["pruner"].history] for end in (whole, resumed)]
    assert removed[0] == removed[1]

"""Pruning on several ranks: the same masks and weights on all of them, and those of one process with all batches."""

import importlib
from pathlib import Path

import pytest
import torch
from models import cross_entropy, failing_loss
from pruning_cases import PAPER
from rank_pool import on_ranks
from states import same, unchanged
from torch import nn

from mfac.pruning import GradualPruner, prune

NUM_BATCHES = 24
QUICK = PAPER | {"num_grads": 12, "block_size": 8, "damping": 1e-3, "recomputations": 3, "loss_batches": 2}


def batches_of(*shape):
    inputs, targets = torch.randn(4 * NUM_BATCHES, *shape).double(), torch.randint(3, (4 * NUM_BATCHES,))
    return list(zip(inputs.split(4), targets.split(4), strict=True))


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, batches_of(8)


def convolutions():
    torch.manual_seed(1)
    first, second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Flatten(), nn.Linear(16, 3))
    return model.double(), batches_of(4, 4, 4)


PROBLEMS = {"linear": problem, "convolutions": convolutions}


def result_of(model, result):
    records = [(r.removed, r.sparsity, r.loss_before, r.loss_after, r.predicted_increase, r.damping)
               for r in result.history]  # fmt: skip
    return result.masks, dict(model.state_dict()), records


def together(group, kind, sparsity, options):
    """Each rank has every size-th batch."""
    model, batches = PROBLEMS[kind]()
    rank, size = group.rank(), group.size()
    if options.get("bn_batches"):
        options = options | {"bn_batches": batches[rank::size][:2]}
    result = prune(model, cross_entropy, batches[rank::size], sparsity, process_group=group, **(QUICK | options))
    return result_of(model, result)


def alone(kind, sparsity, options, size):
    """One process with the batches of all ranks, in the order of their rows."""
    model, batches = PROBLEMS[kind]()
    if options.get("bn_batches"):
        options = options | {"bn_batches": batches[: 2 * size]}
    options = QUICK | options
    options["loss_batches"] *= size
    return result_of(model, prune(model, cross_entropy, batches, sparsity, **options))


def check(results, expected):
    masks, state, records = expected
    for found_masks, found_state, found_records in results:
        assert same(found_masks, masks)
        for name, value in found_state.items():
            torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9)
            assert torch.equal(value, results[0][1][name]), f"{name} differs between ranks"
        assert found_records == results[0][2]
        assert len(found_records) == len(records)
        for ours, theirs in zip(found_records, records, strict=True):
            assert [value or 0.0 for value in ours] == pytest.approx([value or 0.0 for value in theirs], rel=1e-7)


CASES = [
    ("linear", 0.6, {}, (1, 2, 4)),
    ("linear", 0.6, {"block_size": None}, (3,)),
    ("linear", 0.6, {"update": "obs"}, (3,)),
    ("linear", 0.6, {"block_size": None, "update": "none", "scope": "layer"}, (2,)),
    ("convolutions", 0.7, {"block_size": None, "bn_batches": True}, (4,)),
    ("linear", None, {"pattern": "2:4", "targets": ["0.weight", "2.weight"]}, (3,)),
    ("convolutions", None, {"pattern": "1:4", "targets": ["0.weight", "3.weight"], "block_size": None}, (3,)),
    ("linear", 0.4, {"pattern": "row", "block_size": None}, (3,)),
    ("linear", 0.4, {"pattern": "channel"}, (3,)),
    ("linear", 0.5, {"order": "greedy"}, (3,)),
    ("linear", 0.5, {"block_size": 4}, (3,)),  # twelve gradients and blocks of four: their sums are kept, not the rows
    ("linear", 0.5, {"block_size": 200, "targets": ["0.weight", "2.weight"]}, (3,)),  # two blocks for three ranks
    ("linear", 0.5, {"method": "magnitude"}, (3,)),
    ("linear", 0.5, {"method": "diagonal"}, (3,)),
    ("linear", 0.5, {"damping": "auto", "block_size": None}, (3,)),
    ("linear", {"0.weight": 0.3, "4.weight": 0.5}, {}, (3,)),
    ("linear", 0.5, {"per_sample": True}, (3,)),
    ("linear", 0.6, {"block_size": "row", "damping": "auto"}, (2, 3)),
    ("convolutions", 0.6, {"block_size": "row", "recalibrate": True}, (2,)),
]


@pytest.mark.parametrize(
    ("kind", "sparsity", "options", "size"),
    [pytest.param(*case, size, id=f"{case}-{size}") for *case, sizes in CASES for size in sizes],
)
def test_the_masks_of_one_process(rank_pool, kind, sparsity, options, size):
    # Every rank gives its num_grads / size gradients from its own batches: one process sees the same ones.
    check(rank_pool.run(size, together, kind, sparsity, options), alone(kind, sparsity, options, size))


def gradual(group):
    model, batches = problem()
    rank, size = group.rank(), group.size()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pruner = GradualPruner(model, cross_entropy, batches[rank::size], [0.3, 0.6], optimizer=optimizer,
                           process_group=group, **QUICK)  # fmt: skip
    while (result := pruner.step()) is not None:
        for batch in batches[:3]:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
        last = result
    return last.masks, dict(model.state_dict()), last.sparsity


def test_gradual_pruning_keeps_ranks_alike(rank_pool):
    results = rank_pool.run(2, gradual)
    for masks, state, sparsity in results:
        assert sparsity == pytest.approx(0.6, abs=0.01)
        assert same(masks, results[0][0])
        assert same(state, results[0][1])
        assert all(int((state[name] == 0).sum()) >= int((~mask).sum()) for name, mask in masks.items())


def interrupted(group, change, at):
    """The error of this rank where the last one fails; the masks of the steps that were complete, and the weights."""
    model, batches = problem()
    rank, size = group.rank(), group.size()
    steps = []

    def on_step(result):
        steps.append({name: mask.clone() for name, mask in result.masks.items()})
        if change == "on_step" and rank == size - 1 and len(steps) == 2:
            raise KeyboardInterrupt

    loss_fn = cross_entropy if rank < size - 1 or change == "on_step" else failing_loss(at, change)
    try:
        prune(model, loss_fn, batches[rank::size], 0.6, on_step=on_step, process_group=group, **QUICK)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, steps, dict(model.state_dict())


# A step on each of three ranks: 4 gradients and 2 losses; before the first, 2 losses.
@pytest.mark.parametrize(
    ("change", "at", "done", "message"),
    [
        (OSError("the disk is gone"), 8, 0, "OSError: the disk is gone"),  # after the first step was written
        (OSError("the disk is gone"), 10, 1, "OSError: the disk is gone"),
        (None, 13, 1, "the loss became nan in this step, which is undone"),
        ("on_step", 0, 2, "on_step failed on rank 2: KeyboardInterrupt"),
    ],
)
def test_a_failure_on_one_rank_leaves_the_last_complete_step_on_all(rank_pool, change, at, done, message):
    results = rank_pool.run(3, interrupted, change, at)
    complete, states = results[0][2], [state for *_, state in results]
    for rank, (kind, text, steps, state) in enumerate(results):
        if rank < 2:
            assert kind == "RuntimeError"
            assert message in text
        assert len(steps) == done
        assert same(state, states[0])
        assert all(map(same, steps, complete))
    expected = problem()[0].state_dict()
    for name, value in states[0].items():
        if not done:
            assert torch.equal(value, expected[name])
        elif name in complete[-1]:
            assert torch.equal(value != 0, complete[-1][name])


def other_weights(model):
    model[2].weight.data[0, 0] += 1e-15
    return {}


# What all ranks say, and the options of the last one, or of all.
REFUSED = {
    r"sparsity must be the same on every rank: rank 3 has 0\.6, rank 0 0\.5": lambda model: {"sparsity": 0.6},
    "the model's weights must be the same on every rank": other_weights,
    r"which weights there are \(names, sizes and masks\) must be the same on every rank": (
        lambda model: {"masks": {"0.weight": torch.arange(96).view(12, 8) != 7}}
    ),
    "update must be one of 'auto', 'joint', 'obs', 'none', not 'magic'": lambda model: {"update": "magic"},
    "rows_dir is for one process": {"rows_dir": "."},
    "refit=True is for one process": {"refit": True},
    "pattern channel with the full matrix works on one process": {"pattern": "channel", "block_size": None},
}


@pytest.mark.parametrize("message", REFUSED)
@on_ranks(4)
def test_what_does_not_fit_is_refused_on_all_ranks(group, message):
    (model, batches), change = problem(), REFUSED[message]
    options = QUICK | {"sparsity": 0.5, "process_group": group}
    options |= change if isinstance(change, dict) else change(model) if group.rank() == 3 else {}
    with unchanged(model), pytest.raises(ValueError, match=message):
        prune(model, cross_entropy, batches[group.rank() :: 4], options.pop("sparsity"), **options)


def buffers(group):
    """Running statistics that differ between ranks, as they do after training under DDP."""
    model, batches = convolutions()
    rank, size = group.rank(), group.size()
    model[1].running_mean += 0.1 * rank
    return result_of(model, prune(model, cross_entropy, batches[rank::size], 0.5, process_group=group, **QUICK))


def test_buffers_become_those_of_the_first_rank(rank_pool):
    model, _ = convolutions()
    results = rank_pool.run(2, buffers)
    check(results, alone("convolutions", 0.5, {}, 2))
    assert torch.equal(results[1][1]["1.running_mean"], model[1].running_mean)


def the_example(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
        patch.setattr("mfac.prune", lambda *given, **options: prune(*given, **options | {"recomputations": 4}))
        model, masks, dense, sparse = importlib.import_module("prune_torchrun").main(group)
    return dict(model.state_dict()), masks, dense, sparse


def test_the_example_prunes_what_ddp_has_trained(rank_pool):
    results = rank_pool.run(2, the_example)
    for state, masks, dense, sparse in results:
        assert same(state, results[0][0])
        assert same(masks, results[0][1])
        assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.9 * (64 * 128 + 128 * 10))
        assert all(not bool(state[name][~mask].any()) for name, mask in masks.items())
        assert dense > 94
        assert sparse > 90

"""Pruner: one step at a time, saved and resumed between any two; and the options that all entry points share."""

import copy
import inspect
from dataclasses import fields, replace

import pytest
import torch
from models import mlp
from pruning_cases import PAPER
from states import same, state_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mfac
from mfac.pruning import GradualPruner, prune
from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.options import PruningOptions
from mfac.pruning.step import Pruner

QUICK = PruningOptions(**PAPER, num_grads=4, block_size=8, recomputations=3, loss_batches=2, progress=False)


def loader(generator=None):
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(24, 5), torch.randint(3, (24,)))
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator)


@pytest.mark.parametrize("entry", [prune, GradualPruner])
def test_every_option_is_an_argument_with_its_default(entry):
    arguments = inspect.signature(entry).parameters
    for option in fields(PruningOptions):
        default = 0 if (entry, option.name) == (GradualPruner, "seed") else option.default
        assert arguments[option.name].default == default, option.name
    ours = {option.name for option in fields(PruningOptions)}
    own = {"model", "loss_fn", "batches", "masks", "on_step", "sparsity", "schedule", "optimizer", "reset_momentum"}
    assert set(arguments) - ours <= own


def test_steps_are_those_of_prune():
    case, twin = mlp(), mlp()
    pruner = Pruner(case.model, case.loss_fn, [case.batch], 0.6, QUICK)
    assert (pruner.total, pruner.steps_done, pruner.done) == (3, 0, False)
    for number in (1, 2, 3):
        assert pruner.step().step == pruner.steps_done == number
    assert pruner.done
    assert same(copy.deepcopy(pruner).result.masks, pruner.result.masks)
    with pytest.raises(TypeError, match="cannot be pickled or copied while it reads a DataLoader; save its"):
        copy.deepcopy(Pruner(case.model, case.loss_fn, loader(), 0.7, QUICK))
    options = {option.name: getattr(QUICK, option.name) for option in fields(QUICK)}
    result = prune(twin.model, twin.loss_fn, [twin.batch], 0.6, **options)
    assert same(state_of(case.model), state_of(twin.model))
    assert same(pruner.result.masks, result.masks)
    with pytest.raises(RuntimeError, match="all 3 steps are done"):
        pruner.step()


BY_OUTPUT = {"block_size": "row", "fisher": "gauss-newton", "damping": "auto"}


@pytest.mark.parametrize(("steps", "own", "options"), [(0, False, {"seed": 5}), (2, True, {}), (2, False, BY_OUTPUT)])
def test_a_resumed_run_is_that_of_an_undisturbed_one(tmp_path, steps, own, options):
    def build(start):
        case = mlp()
        case.model.insert(1, nn.BatchNorm1d(7))
        batches = loader(torch.Generator().manual_seed(start) if own else None)  # its own generator
        bn_batches = loader(torch.Generator().manual_seed(start))
        torch.manual_seed(start)
        stream = BatchStream(batches, options.get("seed"))
        next(stream)  # a stream that something else has drawn from
        chosen = replace(QUICK, bn_batches=bn_batches, **options)
        return case.model, Pruner(case.model, mfac.criterion_loss(nn.CrossEntropyLoss()), stream, 0.7, chosen)

    model, pruner = build(1)
    for _ in range(steps):
        pruner.step()
    torch.save({"model": model.state_dict(), "pruner": pruner.state_dict()}, tmp_path / "state.pt")
    pruner.run()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    other_model, other = build(2)
    other.load_state_dict(state["pruner"])
    other_model.load_state_dict(state["model"])
    assert other.steps_done == steps
    other.run()
    assert same(state_of(model), state_of(other_model))
    assert same(pruner.result.masks, other.result.masks)
    assert [r.loss_before for r in pruner.result.history] == [r.loss_before for r in other.result.history]


def test_a_state_of_another_run_is_refused():
    case = mlp()
    pruner = Pruner(case.model, case.loss_fn, [case.batch], 0.6, QUICK)
    pruner.step()
    other = Pruner(case.model, case.loss_fn, [case.batch], 0.5, QUICK)
    with pytest.raises(ValueError, match="saved by a run with other arguments; build the Pruner with the same"):
        other.load_state_dict(pruner.state_dict())
    for change, message in (
        ({"masks": {}}, "the state of the pruner is damaged.* '0.weight' is missing; load another"),
        ({"masks": {name: torch.ones(2) for name in pruner.weights.masks}}, r"bool tensor of shape \(7, 5\)"),
        ({"history": 5}, "the state of the pruner is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(pruner.state_dict() | {"plan": other.state_dict()["plan"]} | change)
    assert other.steps_done == 0
    assert all(mask.all() for mask in other.weights.masks.values())

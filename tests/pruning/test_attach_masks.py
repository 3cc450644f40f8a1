"""Zeros stay zero under any optimizer, and the optimizer forgets what is removed."""

import copy

import pytest
import torch
from models import mlp
from pruning_cases import some_masks
from states import unchanged
from torch import nn

import mfac
from mfac.pruning.mask_keeper import attach_masks

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "mfac": lambda p: mfac.MFAC(p, lr=0.1, num_grads=3, momentum=0.5, weight_decay=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def train(case, optimizer, steps=4):
    def closure():
        optimizer.zero_grad()
        loss = case.loss_fn(case.model, case.batch)
        loss.backward()
        return loss

    for _ in range(steps):
        closure()
        optimizer.step(closure)


def astray(model, masks):
    """Removed weights that are not exactly zero."""
    return sum(int((model.get_parameter(name)[~mask] != 0).sum()) for name, mask in masks.items())


def remembered(optimizer, model, masks):
    """What the optimizer still knows of removed weights."""
    states = [(optimizer.state[model.get_parameter(name)], mask) for name, mask in masks.items()]
    values = [(v, mask) for state, mask in states for v in state.values()]
    return sum(int(v[~m].count_nonzero()) for v, m in values if torch.is_tensor(v) and v.shape == m.shape)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_zeros_stay_zero(kind):
    case = mlp()
    optimizer = OPTIMIZERS[kind](case.model.parameters())
    if kind != "lbfgs":
        train(case, optimizer)  # momentum of weights that are removed later
    masks = some_masks(case.model)
    assert astray(case.model, masks)
    attach_masks(optimizer, masks, case.model)
    before = copy.deepcopy(case.model.state_dict())
    assert not astray(case.model, masks)
    for _ in range(3):
        train(case, optimizer, 1)
        assert not astray(case.model, masks)
        assert not remembered(optimizer, case.model, masks)
    assert not torch.equal(before["0.weight"], case.model[0].weight)


@pytest.mark.parametrize("by", ["param_names", "model", "parameter", "plain names of a compiled model"])
def test_masks_by_name_or_parameter(by):
    case = mlp()
    masks = some_masks(case.model)
    wrapped = torch.compile(case.model) if by.startswith("plain") else case.model
    named = wrapped.named_parameters()
    optimizer = torch.optim.SGD([p for _, p in named] if by in ("model", "parameter") else list(named), lr=0.1)
    given = {case.model.get_parameter(name): mask for name, mask in masks.items()} if by == "parameter" else masks
    attach_masks(optimizer, given, case.model if by == "model" else None)
    train(case, optimizer)
    assert not astray(case.model, masks)


def test_masks_are_tightened_refused_and_let_go():
    case = mlp()
    masks = some_masks(case.model)
    optimizer = torch.optim.Adam(case.model.named_parameters(), lr=0.1)
    keeper = attach_masks(optimizer, masks)
    train(case, optimizer)
    older = copy.deepcopy(optimizer.state_dict())
    tighter = {name: mask & (torch.rand(mask.shape) > 0.5) for name, mask in masks.items()}
    assert astray(case.model, tighter)
    keeper.update(tighter)
    assert not astray(case.model, tighter)
    assert not remembered(optimizer, case.model, tighter)
    optimizer.load_state_dict(older)  # does not bring removed momentum back
    assert not remembered(optimizer, case.model, tighter)
    with pytest.raises(ValueError, match="needs a bool tensor of shape"):
        keeper.update({"0.weight": torch.ones(2, 2, dtype=torch.bool)})
    with keeper:
        train(case, optimizer)
        assert not astray(case.model, tighter)
    train(case, optimizer)
    assert astray(case.model, tighter)


@pytest.mark.parametrize("wrapper", ["lightning", "accelerate"])
def test_wrapped_and_under_a_grad_scaler(wrapper):
    from accelerate import Accelerator
    from lightning.pytorch.core.optimizer import LightningOptimizer

    case = mlp()
    masks = some_masks(case.model)
    groups = [{"params": module.parameters()} for module in (case.model[0], case.model[2])]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    wrapped = LightningOptimizer(optimizer) if wrapper == "lightning" else Accelerator(cpu=True).prepare(optimizer)
    attach_masks(wrapped, {name: mask.float() for name, mask in masks.items()}, case.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(case.loss_fn(case.model, case.batch)).backward()
        scaler.step(optimizer if wrapper == "lightning" else wrapped)
        scaler.update()
    assert not astray(case.model, masks)


def test_sharded_parameters():
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        case = mlp()
        masks = some_masks(case.model)
        fully_shard(case.model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.Adam(case.model.parameters(), lr=0.1)
        attach_masks(optimizer, masks, case.model)
        train(case, optimizer)
        for name, mask in masks.items():
            assert not case.model.get_parameter(name).full_tensor()[~mask].count_nonzero()
    finally:
        torch.distributed.destroy_process_group()


def test_a_parameter_without_a_gradient_and_one_with_a_sparse_one():
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4))
    masks = {"0.weight": torch.rand(6, 4) > 0.5, "1.weight": torch.rand(4, 4) > 0.5}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_masks(optimizer, masks, model)
    model[0](torch.arange(6)).sum().backward()
    optimizer.step()
    assert not astray(model, masks)


MASK = torch.ones(7, 5, dtype=torch.bool)
REFUSED = [  # masks, whether a model is given, whether the optimizer has names
    ({"zzz": MASK}, False, True, "matches no parameter of the optimizer; it has"),
    ({"0.weight": MASK}, False, False, r"pass model=, or build the optimizer from model.named_parameters\(\)"),
    ({"0.weight": MASK.T}, True, True, r"'0.weight' needs a bool tensor of shape \(7, 5\).* of shape \(5, 7\)"),
    ({nn.Parameter(torch.ones(7, 5)): MASK}, False, True, r"shape \(7, 5\) matches no parameter of the opt"),
]


@pytest.mark.parametrize(("masks", "with_model", "with_names", "message"), REFUSED)
def test_masks_that_do_not_fit(masks, with_model, with_names, message):
    model = mlp().model
    optimizer = torch.optim.SGD(list(model.named_parameters()) if with_names else model.parameters(), lr=0.1)
    with unchanged(model), pytest.raises(ValueError, match=message):
        attach_masks(optimizer, masks, model if with_model else None)


def test_something_else_than_the_optimizer_of_the_model():
    case = mlp()
    optimizer = torch.optim.SGD(mlp().model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none of the 2 masked parameters is in the optimizer; was the model copied"):
        attach_masks(optimizer, some_masks(case.model), case.model)
    with pytest.raises(ValueError, match=r"must be a torch.optim.Optimizer, not a Linear"):
        attach_masks(nn.Linear(2, 2), {})

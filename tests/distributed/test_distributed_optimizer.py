"""The optimizer on two to four ranks: the trajectories of one process, a part of the memory, and few numbers sent."""

import math

import pytest
import torch
from distributed_cases import CASES, SETTINGS, Sent, Training, groups_of
from optimizers import network
from rank_pool import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from mfac import MFAC, MFACPreconditioner

WAYS = ("ddp", "fsdp")
STEPS = {"masks": 14, "momentum_l2": 68, "clipped": 24, "full_matrix": 14}  # factors are made anew after 64


def trained(group, way, steps, options=None):
    results = {}
    for name, count in steps.items():
        training = Training(group, way, **(CASES[name] | (options or {}))).steps(range(count))
        results[name] = training.weights(), training.optimizer.diagnostics()
    return results


@pytest.fixture(scope="module")
def alone():
    return trained(None, "ddp", STEPS)


@pytest.mark.parametrize(("size", "way"), [(3, "ddp"), (4, "fsdp")])
def test_trajectories_are_those_of_one_process_and_ranks_have_the_same_bits(rank_pool, alone, size, way):
    ranks = rank_pool.run(size, trained, way, STEPS)
    for name, (weights, figures) in alone.items():
        for rank in ranks:
            assert all(map(torch.equal, rank[name][0], ranks[0][name][0]))
        torch.testing.assert_close(ranks[0][name][0], weights, rtol=1e-10, atol=1e-12)
        expected = {key: value for key, value in figures.items() if key != "seconds"}
        assert {key: ranks[0][name][1][key] for key in expected} == pytest.approx(expected, rel=1e-9)


def measured(group, way):
    training = Training(group, way, momentum=0.9)
    training.steps(range(SETTINGS["num_grads"] + 1))
    training.backward(99)
    with Sent() as sent:
        training.optimizer.step()
    shapes = [tensor.shape for tensor in Training(None, way).model.parameters()]
    columns = sum(math.ceil(shape[0] / group.size()) * shape[1:].numel() for shape in shapes)
    return training.operator.rows.nbytes, columns, sent.messages


def test_memory_and_messages_of_a_step(rank_pool):
    """Data parallel: m numbers are summed, the step is gathered. Fully sharded: they are summed. One rank: nothing."""
    d, m = 5 * 7 + 7 + 7 * 3 + 3, SETTINGS["num_grads"]
    for held, columns, messages in rank_pool.run(3, measured, "ddp"):
        assert held == 8 * m * columns  # an even share, but for what is left over of every parameter
        assert columns <= d / 3 + 5 + 1 + 7 + 1
        assert [numbers for _, numbers, _ in messages] == [m, columns + 3]
        assert "allreduce" in messages[0][0]
        assert "allgather" in messages[1][0]
    ranks = rank_pool.run(3, measured, "fsdp")
    assert sum(held for held, _, _ in ranks) == 8 * m * d
    for held, columns, messages in ranks:
        assert held <= 8 * m * columns
        assert [(numbers, size) for _, numbers, size in messages] == [(m, 8 * m)]
    for way in WAYS:
        ((_, _, messages),) = rank_pool.run(1, measured, way)
        assert messages == []


def by_hand(group, way):
    """Gradients set by hand: one parameter thawed and a group added in mid-training, one without a gradient."""
    placed = way == "fsdp" and group is not None
    mesh = DeviceMesh.from_group(group, "cpu") if placed else None
    generator = torch.Generator().manual_seed(0)

    def placed_or_not(values):
        return distribute_tensor(values, mesh, [Shard(0)]) if placed else values

    def draw(*shape):
        return placed_or_not(torch.randn(*shape, generator=generator, dtype=torch.float64))

    params = [torch.nn.Parameter(draw(*shape)) for shape in ((2, 3), (4,), (1, 5), (3, 2))]
    params[1].requires_grad_(False)
    where = {"process_group": group} if way == "ddp" else {}
    optimizer = MFAC(params[:3], **SETTINGS, **where)
    for step in range(12):
        if step == 3:
            params[1].requires_grad_(True)
        if step == 6:
            optimizer.add_param_group({"params": [params[3]], "lr": 0.01})
        for number, parameter in enumerate(params):
            gradient = draw(*parameter.shape)
            parameter.grad = gradient if parameter.requires_grad and (number, step) != (0, 8) else None
        optimizer.step()
    whole = [parameter.full_tensor() if placed else parameter for parameter in params]
    return [tensor.detach().clone() for tensor in whole]


@on_ranks(2, 4)
def test_parameters_that_are_thawed_or_added_in_mid_training(group):
    for way in WAYS:
        torch.testing.assert_close(by_hand(group, way), by_hand(None, "ddp"), rtol=1e-10, atol=1e-12)


@on_ranks(4)
def test_two_replicas_of_two_shards_each(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    training, alone = (Training(None, "ddp", momentum=0.9) for _ in range(2))
    fully_shard(training.model, mesh=mesh)
    training.placed, training.group = True, group
    training.optimizer = MFAC(groups_of(training.model), **SETTINGS, momentum=0.9)
    weights, expected = (each.steps(range(12)).weights() for each in (training, alone))
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
    rows = training.optimizer.state_dict()["state"][0]["rows"]
    assert rows.shape == (8, 7, 5)
    assert rows.to_local().shape[1] in (3, 4)
    assert training.operator.rows.shape[1] < 0.65 * 66


def preconditioned(group):
    training = Training(group, "ddp")
    where = {} if group is None else {"process_group": group}
    preconditioner, fresh = (MFACPreconditioner(training.model.named_parameters(), 8, 0.05, **where) for _ in range(2))
    for step in range(10):
        training.backward(step)
        assert preconditioner.step()
        for parameter in training.model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.05)
    fresh.load_state_dict(preconditioner.state_dict())
    training.backward(10)
    assert fresh.step()
    return [parameter.grad.clone() for parameter in training.model.parameters()]


@on_ranks(3)
def test_the_preconditioner_on_ranks(group):
    torch.testing.assert_close(preconditioned(group), preconditioned(None), rtol=1e-10, atol=1e-12)


@on_ranks(3)
def test_the_memory_of_a_rank_is_known_before(group):
    model = network()
    size = MFAC.memory_needed(model.parameters(), 8, momentum=0.9, process_group=group)
    rows = MFAC(model.parameters(), num_grads=8, process_group=group)._window.operator.rows
    assert size == rows.nbytes + 4 * 8 * 8**2 + 4 * 66

"""What goes wrong on one rank: all of them say so, and none waits for ever."""

import os
import signal
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed_cases import SETTINGS, Training
from optimizers import network
from processes import started
from rank_pool import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mfac import MFAC, MFACPreconditioner
from mfac.distributed.groups import GroupRanks


def one_rank(folder, rank):
    """The second of two ranks dies in mid-step, when its products are made and the other waits for them."""
    dist.init_process_group("gloo", f"file://{folder / 'store'}", timedelta(seconds=8), 2, rank)
    training = Training(dist.group.WORLD, "ddp").steps(range(3))
    if rank == 1:
        GroupRanks.sum_ = lambda self, values: os.kill(os.getpid(), signal.SIGKILL)
    try:
        training.steps(range(3, 4))
    except RuntimeError as error:
        (folder / "failed").write_text(str(error))
        os._exit(3)  # the group would wait for the one that is gone


def test_a_rank_killed_in_mid_step_stops_the_others_which_say_what_to_do(tmp_path):
    ranks = [started(one_rank, tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [3, -signal.SIGKILL]
    message = (tmp_path / "failed").read_text()
    assert "over 2 ranks failed on rank 0: another process has ended" in message
    assert "restart from the last checkpoint" in message


@pytest.mark.parametrize(("way", "nonfinite"), [("ddp", "skip"), ("fsdp", "raise")])
@on_ranks(2)
def test_a_gradient_that_is_not_finite_on_one_rank_is_handled_alike_by_all(group, way, nonfinite):
    """When it would enter the window, when it would only be multiplied, and when the damping would change with it."""
    for options in ({}, {"update_every": 5}, {"damping": lambda_of_steps}):
        training = Training(group, way, nonfinite=nonfinite, **options).steps(range(3))
        before = training.weights()
        training.backward(3)
        for parameter in training.model.parameters() if group.rank() == 1 else ():
            local = parameter.grad.to_local() if training.placed else parameter.grad
            local.view(-1)[-1:] = float("inf")
        raised = pytest.raises(RuntimeError, match="the gradient is not finite")
        with raised if nonfinite == "raise" else nullcontext():
            training.optimizer.step()
        assert all(map(torch.equal, training.weights(), before))
        assert training.optimizer.skipped == (nonfinite == "skip")
        expected = Training(None, way, **options).steps(range(6)).weights()
        torch.testing.assert_close(training.steps(range(3, 6)).weights(), expected, rtol=1e-10, atol=1e-12)


def lambda_of_steps(step):
    return 0.05 + 0.01 * step


def pruned(names, options):
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[0, 0] = False
    names["0.weight"].data[0, 0] = 0
    return names, options | {"masks": {"0.weight": mask}}


BIAS = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
DIFFERENCES = {
    r"the window must be the same on every rank: rank 1 has {'num_grads': 9": lambda n, o: (n, o | {"num_grads": 9}),
    "the options of the window must be the same on every rank": lambda n, o: (n, o | {"damping": lambda_of_steps}),
    r"parameter 3 must be .*: rank 1 has '2.bias: \[4\] torch.float64'": lambda n, o: (n | {"2.bias": BIAS}, o),
    r"parameter 0 must be .*: rank 1 has '0.weight: \[7, 5\] torch.float64, 34 w": pruned,
    "the number of parameters must be .*: rank 1 has 3, rank 0 4": lambda n, o: (dict(list(n.items())[:3]), o),
}


@pytest.mark.parametrize("message", DIFFERENCES)
@on_ranks(2)
def test_ranks_that_differ_are_refused_at_construction(group, message):
    options = {"masks": {"0.weight": torch.ones(7, 5, dtype=torch.bool)}} | SETTINGS
    names = dict(network().double().named_parameters())
    if group.rank() == 1:
        names, options = DIFFERENCES[message](names, options)
    with pytest.raises(ValueError, match=message):
        MFAC(names.items(), process_group=group, **options)


@on_ranks(2)
def test_layouts_that_cannot_be_cut_are_refused_by_name(group):
    mesh, whole = DeviceMesh.from_group(group, "cpu"), torch.ones(4, 6)
    plain, mask = torch.nn.Parameter(whole.clone()), torch.ones(4, 6, dtype=torch.bool)
    mask[0, 0] = False
    sharded, other, crosswise = (
        torch.nn.Parameter(distribute_tensor(whole * mask, mesh, [placement]))
        for placement in (Shard(0), Replicate(), Shard(1))
    )
    for params, options, message in (
        ([("w", sharded), ("b", other)], {}, r"b has the placements \(Replicate\(\),\); .* needs .* that are Shard"),
        ([("w", sharded), ("b", plain)], {}, "b is a plain tensor and other parameters are DTensors"),
        ([("w", sharded)], {"process_group": group}, "leave process_group out"),
        ([("w", crosswise)], {"masks": {"w": mask}}, r"w is sharded along dimension 1, and masks need Shard\(0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            MFAC(params, num_grads=2, **options)
    optimizer = MFAC([sharded], num_grads=2)
    sharded.grad = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()], run_check=False)
    message = r"a gradient has the placements \(Partial\(sum\),\) and its parameter \(Shard\(dim=0\),\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@on_ranks(3)
def test_parameters_cut_along_another_dimension(group):
    """As tensor parallel does; by the optimizer and a preconditioner."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(5, 4, 6, dtype=torch.float64, generator=generator).split([1, 4])
    mesh = DeviceMesh.from_group(group, "cpu")
    placed = torch.nn.Parameter(distribute_tensor(weights[0], mesh, [Shard(1)]))
    whole = torch.nn.Parameter(weights[0].clone())
    optimizers = [MFAC([each], num_grads=3, damping=0.1) for each in (placed, whole)]
    preconditioners = [MFACPreconditioner([each], 3, 0.1) for each in (placed, whole)]
    for gradient in gradients:
        for each, optimizer, preconditioner in zip((placed, whole), optimizers, preconditioners, strict=True):
            each.grad = distribute_tensor(gradient, mesh, [Shard(1)]) if each is placed else gradient.clone()
            optimizer.step()
            preconditioner.step()
        torch.testing.assert_close(placed.grad.full_tensor(), whole.grad)
    torch.testing.assert_close(placed.full_tensor(), whole)

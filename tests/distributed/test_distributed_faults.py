"""What goes wrong on one rank: all of them say so, none waits for ever, and a checkpoint brings the run back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_cases import SETTINGS, Training, network
from interrupted_ranks import OPTIONS, STEPS

from mfac import MFAC, MFACPreconditioner

SCRIPT = Path(__file__).parents[1] / "support" / "interrupted_ranks.py"


def start(folder, way, *killed):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder)]
    return [subprocess.Popen([*command, str(rank), "2", way, *killed], env=environment) for rank in range(2)]


def uninterrupted(group, way):
    return Training(group, way, **OPTIONS).steps(range(STEPS)).weights()


def test_a_rank_killed_in_mid_step_stops_the_others_and_the_checkpoint_brings_them_back(rank_pool, tmp_path):
    survivor, killed = start(tmp_path, "ddp", "9")
    assert killed.wait(120) == -signal.SIGKILL
    assert survivor.wait(60) == 3
    message = (tmp_path / "failed-0").read_text()
    assert "over 2 ranks failed on rank 0: another process has ended" in message
    assert "restart from the last checkpoint" in message
    assert [rank.wait(120) for rank in start(tmp_path, "ddp")] == [0, 0]
    for rank, expected in enumerate(rank_pool.run(2, uninterrupted, "ddp")):
        weights = torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True)
        assert all(map(torch.equal, weights, expected))


# Gradients that are not finite.


def poison(training, rank):
    """Spoils a number of one rank's gradients, behind the sum over the ranks."""
    if training.group.rank() == rank:
        for parameter in training.model.parameters():
            local = parameter.grad.to_local() if training.placed else parameter.grad
            local.view(-1)[-1:] = float("inf")


def not_finite(group, way, nonfinite, options):
    training = Training(group, way, nonfinite=nonfinite, **options).steps(range(3))
    before = training.weights()
    training.backward(3)
    poison(training, 1)
    if nonfinite == "raise":
        with pytest.raises(RuntimeError, match="the gradient is not finite"):
            training.optimizer.step()
    else:
        training.optimizer.step()
    same = all(map(torch.equal, training.weights(), before))
    return same, training.optimizer.skipped, training.steps(range(3, 6)).weights()


@pytest.mark.parametrize(("way", "nonfinite"), [("ddp", "skip"), ("fsdp", "raise")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_handled_alike_by_all(rank_pool, way, nonfinite):
    """When it would enter the window, when it would only be multiplied, and when the damping would change with it."""
    for options in ({}, {"update_every": 5}, {"damping": lambda_of_steps}):
        expected = Training(None, way, **options).steps(range(6)).weights()
        for same, skipped, weights in rank_pool.run(2, not_finite, way, nonfinite, options):
            assert same
            assert skipped == (nonfinite == "skip")
            torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def lambda_of_steps(step):
    return 0.05 + 0.01 * step


# Ranks that mean different things.


def refused(group, change):
    """The error of every rank where the second has something else."""
    model, options = network(), {"masks": {"0.weight": torch.ones(7, 5, dtype=torch.bool)}} | SETTINGS
    names = dict(model.named_parameters())
    if group.rank() == 1:
        model, names, options = change(model, names, options)
    try:
        MFAC(names.items(), process_group=group, **options)
    except ValueError as error:
        return str(error)
    return "built"


def another_length(model, names, options):
    return model, names, options | {"num_grads": 9}


def another_schedule(model, names, options):
    return model, names, options | {"damping": lambda_of_steps}


def another_shape(model, names, options):
    return model, names | {"2.bias": torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))}, options


def another_mask(model, names, options):
    with torch.no_grad():
        names["0.weight"][0, 0] = 0
    mask = torch.ones(7, 5, dtype=torch.bool)
    mask[0, 0] = False
    return model, names, options | {"masks": {"0.weight": mask}}


def fewer(model, names, options):
    return model, {name: tensor for name, tensor in names.items() if name != "2.bias"}, options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_length, "the window must be the same on every rank: rank 1 has {'num_grads': 9"),
        (another_schedule, "the options of the window must be the same on every rank"),
        (another_shape, "parameter 3 must be the same on every rank: rank 1 has '2.bias: [4] torch.float64'"),
        (another_mask, "parameter 0 must be the same on every rank: rank 1 has '0.weight: [7, 5] torch.float64, 34 w"),
        (fewer, "the number of parameters must be the same on every rank: rank 1 has 3, rank 0 4"),
    ],
)
def test_ranks_that_differ_are_refused_at_construction(rank_pool, change, message):
    for found in rank_pool.run(2, refused, change):
        assert message in found


def placements(group):
    """Messages for layouts that no window can be cut along."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh, found = DeviceMesh.from_group(group, "cpu"), {}
    whole = torch.ones(4, 6)
    sharded = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    other = torch.nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    plain, mask = torch.nn.Parameter(whole.clone()), torch.ones(4, 6, dtype=torch.bool)
    mask[0, 0] = False
    crosswise = torch.nn.Parameter(distribute_tensor(whole * mask, mesh, [Shard(1)]))
    cases = {
        "replicated": ({"params": [("w", sharded), ("b", other)]}, {}),
        "mixed": ({"params": [("w", sharded), ("b", plain)]}, {}),
        "group": ({"params": [("w", sharded)]}, {"process_group": group}),
        "masked crosswise": ({"params": [("w", crosswise)]}, {"masks": {"w": mask}}),
    }
    for name, (params, options) in cases.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011  the messages are compared outside
            MFAC([params], num_grads=2, **options)
        found[name] = str(error.value)
    optimizer = MFAC([sharded], num_grads=2)
    from torch.distributed.tensor import DTensor

    sharded.grad = DTensor.from_local(torch.ones(4, 6), mesh, [Partial()], run_check=False)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return found | {"partial": str(error.value)}


def test_layouts_that_cannot_be_cut_are_refused_by_name(rank_pool):
    for found in rank_pool.run(2, placements):
        assert "b has the placements (Replicate(),); a window needs parameters that are Shard" in found["replicated"]
        assert "b is a plain tensor and other parameters are DTensors" in found["mixed"]
        assert "leave process_group out" in found["group"]
        assert "w is sharded along dimension 1, and masks need Shard(0)" in found["masked crosswise"]
        assert "a gradient has the placements (Partial(sum),) and its parameter (Shard(dim=0),)" in found["partial"]


def crosswise(group):
    """A parameter cut along its second dimension, as tensor parallel does, and a preconditioner."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

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
    return placed.full_tensor().detach(), whole.detach()


def test_parameters_cut_along_another_dimension(rank_pool):
    for placed, whole in rank_pool.run(3, crosswise):
        torch.testing.assert_close(placed, whole)

"""Rows that several ranks make, each from its own batches, and columns that each keeps: those of one process."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from models import cross_entropy, failing_loss, mlp
from processes import peak
from rank_pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import mfac
from mfac.distributed import exchange
from mfac.distributed.shares import column_shares
from mfac.gradients import accumulate_fisher, collect, collect_gradients
from mfac.layout import ParameterLayout

SIZES = (2, 3)
NUM_BATCHES = 13


def problem():
    """A model in float64 and 13 batches of three samples."""
    case = mlp(3 * NUM_BATCHES)
    return case.model.double(), [(inputs.double(), targets) for inputs, targets in case.batches(3)]


def sizes_of(model):
    return [parameter.numel() for parameter in model.parameters()]


def pieces_of(piece_bytes):
    return patch.object(exchange, "PIECE_BYTES", piece_bytes)


def collected(group, num_grads, options, piece_rows=100):
    """This rank's columns; its batches are every size-th."""
    model, batches = problem()
    rank, size = group.rank(), group.size()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pieces_of(8 * sum(sizes_of(model)) * piece_rows):
        rows = collect_gradients(model, LOSSES[options.get("fisher")], batches[rank::size], num_grads,
                                 process_group=group, progress=False, **options)  # fmt: skip
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    layout = ParameterLayout(model, options.get("params"), options.get("masks"))
    share = column_shares(layout.sizes, size, options.get("block_size"))[rank]
    assert rows.shape == (num_grads, len(share))
    return rows


LOSSES = {None: cross_entropy, "sampled": mfac.criterion_loss(nn.CrossEntropyLoss())}


def alone(num_grads, options):
    model, batches = problem()
    options = {name: value for name, value in options.items() if name != "block_size"}
    return collect_gradients(model, LOSSES[options.get("fisher")], batches, num_grads, progress=False, **options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 8},
        {"fisher": "sampled", "seed": 3},
        {"dtype": torch.bfloat16},
        {"params": "re:weight", "masks": {"0.weight": torch.arange(35).view(7, 5) % 2 > 0}},
    ],
    ids=str,
)
def test_the_rows_of_one_process(rank_pool, size, options):
    assert torch.equal(torch.cat(rank_pool.run(size, collected, 11, options), 1), alone(11, options))


@pytest.mark.parametrize(("piece_rows", "num_grads"), [(1, 2), (2, 7), (3, 13)])
def test_in_any_pieces(rank_pool, piece_rows, num_grads):
    """Rows that the ranks do not divide, ranks that have none to make, columns sent a few at a time."""
    assert torch.equal(torch.cat(rank_pool.run(3, collected, num_grads, {}, piece_rows), 1), alone(num_grads, {}))


@pytest.mark.parametrize(("size", "chunk_size"), [(2, None), (2, 1), (3, 5)])
def test_samples_of_a_distributed_sampler(rank_pool, size, chunk_size):
    case = mlp(12)
    expected = collect_gradients(case.model, case.loss_fn, [case.batch], 12, per_sample=True)
    found = torch.cat(rank_pool.run(size, one_sample_after_the_other, 12, chunk_size), 1)
    torch.testing.assert_close(found, expected)


def one_sample_after_the_other(group, num_grads, chunk_size):
    case = mlp(12)
    data = torch.utils.data.TensorDataset(*case.batch)
    sampler = torch.utils.data.DistributedSampler(data, group.size(), group.rank(), shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    options = {"per_sample": True, "chunk_size": chunk_size, "process_group": group}
    with pieces_of(3 * 4 * sum(sizes_of(case.model))):
        return collect_gradients(case.model, case.loss_fn, loader, num_grads, **options)


@pytest.mark.parametrize("block_size", [4, 40])
@on_ranks(*SIZES)
def test_sums_of_blocks(group, block_size):
    (model, batches), rank, size = problem(), group.rank(), group.size()
    whole = mfac.StaticInverseFisher(accumulate_fisher(model, cross_entropy, batches, 12, block_size), 1e-3)
    blocks = accumulate_fisher(model, cross_entropy, batches[rank::size], 12, block_size, process_group=group)
    op = mfac.StaticInverseFisher(blocks, 1e-3, process_group=group)
    columns = column_shares(sizes_of(model), size, block_size)[rank].columns
    torch.testing.assert_close(op.diagonal(), whole.diagonal()[columns])
    torch.testing.assert_close(op.logdet(), whole.logdet())
    assert blocks.num_grads == 12


def poisoned(batches):
    first, (inputs, targets), *rest = batches
    return [first, (torch.full_like(inputs, torch.nan), targets), *rest]


def other_weights(model):
    model[0].weight.data[0, 0] += 1e-12
    return model


TOGETHER = "collecting gradients failed on rank 2: "
# What the others say, and what the last rank has instead.
FAILURES = {
    f"{TOGETHER}ValueError: num_grads=9 rows were asked for, 3 of them from this rank, and batches gave only 2":
        lambda arguments: {"batches": arguments["batches"][:2]},
    rf"{TOGETHER}\w+: the loss \(nan\) of batch 1 is not finite; the 1 rows before it are good":
        lambda arguments: {"batches": poisoned(arguments["batches"])},
    f"{TOGETHER}KeyError: 'no such column'": lambda arguments: {"loss_fn": failing_loss(1, KeyError("no such column"))},
    "the model's weights must be the same on every rank: rank 2 has":
        lambda arguments: {"model": other_weights(arguments["model"])},
    "num_grads must be the same on every rank: rank 2 has 8, rank 0 9": lambda arguments: {"num_grads": 8},
    r"which weights there are .* must be the same on every rank": lambda arguments: {"params": ["0.weight"]},
    'method must be "auto", "vmap" or "loop"': lambda arguments: {"method": "magic"},
    "out= is for one process": lambda arguments: {"out": "somewhere.rows"},
}  # fmt: skip


@pytest.mark.parametrize("message", FAILURES)
@on_ranks(3)
def test_what_fails_on_one_rank_fails_on_all(group, message):
    rank, (model, batches) = group.rank(), problem()
    arguments = {"model": model.train(), "loss_fn": cross_entropy, "batches": batches[rank::3], "num_grads": 9}
    arguments |= FAILURES[message](arguments) if rank == 2 else {}
    own = re.sub(r"^collecting.*?: [^:]*: ", "", message) if rank == 2 else message
    with pieces_of(8 * sum(sizes_of(model))), pytest.raises((ValueError, RuntimeError, KeyError), match=own):
        collect_gradients(**arguments, process_group=group)
    assert model.training
    # The group is as good as new.
    rows = collect_gradients(problem()[0], cross_entropy, batches[rank::3], 3, process_group=group)
    assert torch.equal(rows, alone(3, {})[:, column_shares(sizes_of(model), 3)[rank].columns])


@on_ranks(2)
def test_a_rank_without_room_for_its_share_stops_all(group):
    model, batches = problem()
    room = (lambda device: 64) if group.rank() == 1 else collect.available_memory
    message = "this is for rank 1: the more ranks, the less for each"
    with patch.object(collect, "available_memory", room), pytest.raises(MemoryError, match=message):
        collect_gradients(model, cross_entropy, batches[group.rank() :: 2], 9, process_group=group)


@on_ranks(2)
def test_models_under_ddp_and_fsdp_and_the_same_batches_on_all_ranks(group):
    model, batches = problem()
    wrapper = nn.parallel.DistributedDataParallel(model, process_group=group)
    with pytest.raises(ValueError, match=r"pass the model inside: model\.module"):
        collect_gradients(wrapper, cross_entropy, batches, 2, process_group=group)
    found = collect_gradients(wrapper.module, cross_entropy, batches[group.rank() :: 2], 4, process_group=group)
    assert torch.equal(found, alone(4, {})[:, column_shares(sizes_of(model), 2)[group.rank()].columns])
    with pytest.warns(UserWarning, match="ranks 0 and 1 brought the same gradient; .* by a DistributedSampler"):
        collect_gradients(model, cross_entropy, batches, 4, process_group=group)
    fully_shard(model := problem()[0], mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ValueError, match="the model has DTensor parameters, of which each rank has a part"):
        collect_gradients(model, cross_entropy, batches, 2, process_group=group)


ROWS, WIDTH = 64, 700


def peak_rise(group):
    """By how many bytes the peak of this process rises; the pages of the rows are touched in full."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
    batches = list(zip(inputs.split(1), targets.split(1), strict=True))
    rank, size = group.rank(), group.size()
    with pieces_of(4 * 2**20):
        collect_gradients(model, cross_entropy, batches[rank::size], size, process_group=group)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = peak()
        rows = collect_gradients(model, cross_entropy, batches[rank::size], ROWS, process_group=group)
    return peak() - before, rows.numel() * 4 / 2**20, sum(sizes_of(model)) * 4 / 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_a_rank_holds_its_share_and_one_piece(rank_pool):
    for rise, share, row in rank_pool.run(4, peak_rise):
        assert share == pytest.approx(ROWS * row / 4, rel=0.01)
        # A piece of 4 MiB, cut out, joined and received, and what a backward pass and malloc take.
        assert rise < share + 4 * 4 + 8 * row

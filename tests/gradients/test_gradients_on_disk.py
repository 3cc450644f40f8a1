"""Rows on disk: the same as in memory, gone on with after any interruption, checked before that."""

import os

import pytest
import torch
from models import CASES, cross_entropy, failing_loss, mlp, noisy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfac.gradient_file import HEADER_BYTES, GradientFile
from mfac.gradients import collect_gradients
from mfac.saved import locked


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gradients.rows"


NUM_GRADS = 100
SAMPLED = {"per_sample": True, "fisher": "sampled", "output_fn": lambda model, batch: model(batch[0])}
MODES = {  # the model, its loss, the samples in a batch
    "batches": ("cnn", cross_entropy, 4, {}),
    "samples with drawn labels": ("transformer", cross_entropy, 24, SAMPLED),
    "samples one by one": ("packed", cross_entropy, 24, {"per_sample": True}),
    "a loss that draws": ("mlp", noisy, 4, {}),
}


def collect(path, mode):
    name, loss_fn, size, options = MODES[mode]
    case = CASES[name](72)
    loader = DataLoader(TensorDataset(*case.batch), batch_size=size)
    collect_gradients(case.model, loss_fn, loader, NUM_GRADS, out=path, cycle=True, **options)


KEEP = {"0.weight": torch.arange(35).view(7, 5) % 2 > 0}


@pytest.mark.parametrize("options", [{}, {"per_sample": True}, {"masks": KEEP, "dtype": torch.bfloat16}], ids=str)
def test_the_file_holds_the_rows(path, options):
    case = mlp(30)
    rows = collect_gradients(case.model, case.loss_fn, [case.batch], 30, cycle=True, **options)
    with torch.device("meta"):  # the default device does not matter
        file = collect_gradients(case.model, case.loss_fn, [case.batch], 30, cycle=True, out=path, **options)
    assert isinstance(file, GradientFile)
    assert file.dtype == rows.dtype
    torch.testing.assert_close(file.read_rows(0, 30), rows)
    assert torch.equal(file.read_columns(0, file.dim), file.read_rows(0, 30))


@pytest.mark.filterwarnings("ignore:per-sample gradients are taken one by one")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("torn_rows", [0.5, 6.3, 99])
def test_a_run_that_lost_its_tail_goes_on_bit_for_bit(path, mode, torn_rows):
    collect(path, mode)
    whole = path.read_bytes()
    row = (len(whole) - HEADER_BYTES) // NUM_GRADS
    with open(path, "r+b") as file:
        file.truncate(len(whole) - int(torn_rows * row))
    torch.manual_seed(99)
    collect(path, mode)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("per_sample", [False, True])
def test_what_was_written_stays_when_the_loss_fails(path, per_sample):
    case = mlp(12)
    batches = case.batches(3)
    rows = 12 if per_sample else 4
    options = {"per_sample": per_sample, "method": "loop", "chunk_size": 2}
    with pytest.raises(ZeroDivisionError):
        collect_gradients(case.model, failing_loss(4, ZeroDivisionError()), batches, rows, out=path, **options)
    assert 0 < GradientFile(path).rows < rows
    file = collect_gradients(case.model, cross_entropy, batches, rows, out=path, **options)
    assert torch.equal(file.read_rows(0, rows), collect_gradients(case.model, cross_entropy, batches, rows, **options))


def test_rows_before_one_that_is_not_finite_stay(path):
    case = mlp(12)
    case.batch[0][10] = torch.inf
    with pytest.raises(RuntimeError, match="sample 10 of batch 0 is not finite; the 10 rows before it are good"):
        collect_gradients(case.model, case.loss_fn, [case.batch], 12, per_sample=True, out=path)
    assert GradientFile(path).rows == 10


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda case: {"model": nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))}, "model"),
        (lambda case: {"batches": [(case.batch[0] + 1, case.batch[1])]}, "batches"),
        (lambda case: {"num_grads": 2, "cycle": True}, "num_grads"),
        (lambda case: {"params": ["0.weight"]}, "dim .*params"),
        (lambda case: {"masks": {"0.bias": torch.arange(7) > 2}}, "masks"),
        (lambda case: {"dtype": torch.bfloat16}, "dtype"),
        (lambda case: {"per_sample": True}, "per_sample"),
        (lambda case: {"seed": 1}, "seed"),
        (lambda case: {"loss_fn": noisy}, "loss_fn"),
    ],
)
def test_a_complete_file_is_not_touched_and_one_made_with_something_else_is_refused(path, change, named):
    case = mlp()
    given = {"model": case.model, "loss_fn": case.loss_fn, "batches": [case.batch], "num_grads": 1, "out": path}
    collect_gradients(**given)
    assert collect_gradients(**(given | {"loss_fn": failing_loss(1, ZeroDivisionError())})).rows == 1
    with pytest.raises(ValueError, match=f"holds 1 rows made with something else: .*{named} .*; delete it or choose"):
        collect_gradients(**(given | change(case)))


def test_files_that_cannot_be_written(path, tmp_path):
    case = mlp()
    GradientFile.create(path, 1, 66)
    for count, out, error, message in (
        (1, path, ValueError, "was not made by collect_gradients; choose another out="),
        (1, tmp_path / "nowhere" / "rows", FileNotFoundError, "out= needs a directory that exists"),
        (10**13, tmp_path / "large", OSError, r"rows take .* and the disk has .* left; collect fewer rows"),
    ):
        with pytest.raises(error, match=message):
            collect_gradients(case.model, case.loss_fn, [case.batch], count, out=out)


def test_fewer_batches_than_the_file_has_rows(path):
    case = mlp(12)
    batches = case.batches(2)
    with pytest.raises(ValueError, match="batches gave only 6 batches"):
        collect_gradients(case.model, case.loss_fn, batches, 9, out=path)
    written = path.read_bytes()
    with pytest.raises(ValueError, match="num_grads=9 rows were asked for and batches gave only 4 batches"):
        collect_gradients(case.model, case.loss_fn, batches[:4], 9, out=path)
    assert path.read_bytes() == written


def test_two_cannot_collect_into_one_file(path):
    lock = path.with_name(path.name + ".lock")
    with (
        locked(lock, path, "choose another out="),
        pytest.raises(ValueError, match=rf"process {os.getpid()} on \S+ is writing to .*; wait for it, or choose"),
    ):
        collect(path, "batches")
    assert not path.exists()
    collect(path, "batches")
    assert list(path.parent.iterdir()) == [path]

"""Collecting rows: what they are, how many, and that the model is left as it was found."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch
from models import CASES, backward_rows, bert, cnn, cross_entropy, mlp
from processes import in_process, peak
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfac.fisher_blocks import FisherBlocks
from mfac.gradients import accumulate_fisher, collect_gradients
from mfac.gradients import collect as collect
from mfac.gradients.losses import model_loss


def test_one_row_per_batch_and_no_more_batches_than_needed_or_again_from_the_first():
    case = cnn(12)  # with dropout and batch norm, in training mode
    loader = DataLoader(TensorDataset(*case.batch), batch_size=3)
    rows = collect_gradients(case.model, case.loss_fn, loader, 4)
    assert torch.equal(rows, backward_rows(case.model, case.loss_fn, case.batches(3)))
    again = collect_gradients(case.model, case.loss_fn, loader, 7, cycle=True)
    assert torch.equal(again, rows[[0, 1, 2, 3, 0, 1, 2]])
    case = mlp()
    endless = itertools.repeat(case.batch)
    taken = itertools.count()
    collect_gradients(case.model, case.loss_fn, (batch for batch, _ in zip(endless, taken, strict=False)), 4)
    assert next(taken) == 4


def test_batches_whose_memory_is_used_again_for_the_next():
    case = mlp(40)
    batches = case.batches(2)
    buffer = tuple(torch.empty_like(part) for part in batches[0])

    def refilled():
        for batch in batches:
            for into, part in zip(buffer, batch, strict=True):
                into.copy_(part)
            yield buffer

    rows = collect_gradients(case.model, case.loss_fn, refilled(), len(batches))
    assert torch.equal(rows, collect_gradients(case.model, case.loss_fn, batches, len(batches)))


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
def test_a_generator_goes_on_where_the_last_call_stopped(per_sample, cycle):
    case = mlp(12)
    batches = case.batches(2)
    expected = collect_gradients(case.model, case.loss_fn, batches, len(batches))
    generator = (batch for batch in batches)
    options = {"per_sample": per_sample, "cycle": cycle}
    each = 2 if per_sample else 1
    collect_gradients(case.model, case.loss_fn, generator, 2 * each, **options)
    rest = collect_gradients(case.model, case.loss_fn, generator, 4 * each, **options)
    torch.testing.assert_close(rest.view(4, each, -1).mean(1), expected[2:])


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_parameter_of_no_dimension(per_sample):
    case = mlp(1)
    case.model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    case = case._replace(loss_fn=lambda m, b: m.scale * cross_entropy(m, b))
    rows = collect_gradients(case.model, case.loss_fn, [case.batch], 1, per_sample=per_sample)
    torch.testing.assert_close(rows, backward_rows(case.model, case.loss_fn, [case.batch]))


def test_batches_as_dicts_and_tuples_and_tensors_also_sparse_ones(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = bert(4)
    expected = backward_rows(case.model.eval(), case.loss_fn, [case.batch])
    for batch in (case.batch, dict(case.batch)):
        assert torch.equal(collect_gradients(case.model, model_loss, [batch], 1), expected)
    tied = CASES["tied"]()
    assert collect_gradients(tied.model, tied.loss_fn, [tied.batch], 1).shape == (1, 126)
    case = mlp()
    case.model.register_forward_pre_hook(lambda module, inputs: inputs[0].to_dense())
    sparse = (case.batch[0].to_sparse(), case.batch[1])
    rows = collect_gradients(case.model, case.loss_fn, [sparse], 1, out=tmp_path / "rows").read_rows(0, 1)
    assert torch.equal(rows, collect_gradients(case.model, case.loss_fn, [case.batch], 1))


@pytest.mark.parametrize("per_sample", [False, True])
def test_rows_of_chosen_parameters_and_of_masks_are_the_kept_columns(per_sample):
    case = mlp()
    keep = {"0.weight": torch.rand(7, 5) > 0.5, "2.bias": torch.tensor([True, False, True])}
    count = 6 if per_sample else 1
    every = collect_gradients(case.model, case.loss_fn, [case.batch], count, per_sample=per_sample)
    columns = [keep.get(name, torch.ones_like(p).bool()).flatten() for name, p in case.model.named_parameters()]
    kept = collect_gradients(case.model, case.loss_fn, [case.batch], count, per_sample=per_sample, masks=keep)
    assert torch.equal(kept, every[:, torch.cat(columns)])
    some = collect_gradients(case.model, case.loss_fn, [case.batch], count, per_sample=per_sample, params="re:^2")
    torch.testing.assert_close(some, every[:, 42:])


THREES = mlp(6).batches(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": THREES}, "num_grads=9 rows were asked for and batches gave only 2 batches; .*cycle=True"),
        ({"batches": THREES, "per_sample": True}, "num_grads=9 .* only 6 samples in 2 batches"),
        ({"batches": []}, "batches is empty; at least one batch"),
        ({"batches": [], "cycle": True}, "batches is empty; at least one batch"),
        ({"batches": iter(THREES[:1]), "cycle": True}, "gave nothing after batch 0: an iterator runs out for good"),
        ({"batches": {"inputs": torch.zeros(2)}}, r"batches is one dict, .*pass \[batch\]"),
        ({"num_grads": 0}, "num_grads must be a positive int, not 0"),
        ({"num_grads": True}, "num_grads must be a positive int, not True"),
        ({"fisher": "true"}, 'fisher must be "empirical", "sampled" or "gauss-newton"'),
        ({"method": "fast"}, 'method must be "auto", "vmap" or "loop"'),
        ({"chunk_size": 0}, "chunk_size must be a positive int or None"),
        ({"dtype": torch.int8}, "rows are floating-point numbers, and dtype is torch.int8"),
        ({"loss_fn": nn.CrossEntropyLoss()}, r"pass mfac.criterion_loss\(CrossEntropyLoss\(\)\)"),
        ({"loss_fn": lambda m, b: m(b[0])}, r"a scalar tensor, it returned a tensor of shape \(6, 3\); reduce it"),
        ({"loss_fn": lambda m, b: 1.0}, "a scalar tensor, it returned float"),
        ({"loss_fn": lambda m, b: b[0].mean()}, "does not depend on any trainable parameter"),
        ({"model": nn.Linear(5, 3, dtype=torch.cfloat)}, "complex parameters: weight, bias; name others in params"),
        ({"sample_fn": lambda m, b: b}, 'sample_fn needs fisher="sampled"'),
        ({"out": "x", "device": "cuda"}, "device='cuda' has no meaning; leave it out"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    case = mlp()
    given = {"model": case.model, "loss_fn": case.loss_fn, "batches": [case.batch], "num_grads": 9} | arguments
    with pytest.raises(ValueError, match=message):
        collect_gradients(**given)


@pytest.mark.parametrize("per_sample", [False, True])
def test_losses_that_are_not_finite_are_named(per_sample):
    case = mlp(12)
    batches = case.batches(4)
    batches[2][0][1] = torch.nan
    where = "sample 1 of batch 2" if per_sample else "batch 2"
    with pytest.raises(RuntimeError, match=rf"the loss \(nan\) of {where} is not finite"):
        collect_gradients(case.model, case.loss_fn, batches, 12, per_sample=per_sample, cycle=True)


def test_a_row_that_is_not_finite_is_refused_and_one_whose_sum_overflows_is_fine():
    case = mlp(4)
    with pytest.raises(RuntimeError, match=r"a dtype of wider range than torch.float16"):
        collect_gradients(case.model, lambda m, b: 1e7 * cross_entropy(m, b), [case.batch], 1, dtype=torch.float16)
    case.model[0].bias.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(RuntimeError, match="the gradient of batch 0 is not finite; the 0 rows before it are good"):
        collect_gradients(case.model, case.loss_fn, [case.batch], 1)
    case = mlp(4)
    assert torch.isfinite(collect_gradients(case.model, lambda m, b: 3e38 * m(b[0]).mean(), [case.batch], 1)).all()


def test_memory_is_asked_for_before_anything_is_allocated_for_rows_or_blocks(monkeypatch):
    case = mlp()
    monkeypatch.setattr(collect, "available_memory", lambda device: 20 * 2**20)
    message = (
        r"100000 gradients of 66 numbers in torch.float32 need 25.2 MiB, and cpu has 20.0 MiB available; "
        r"what would fit: num_grads=79437, dtype=torch.bfloat16 \(12.6 MiB\), out=.* on disk, .*accumulate_fisher"
    )
    with pytest.raises(MemoryError, match=message):
        collect_gradients(case.model, case.loss_fn, [case.batch], 100000)
    monkeypatch.setattr("mfac.gradients.accumulate.available_memory", lambda device: 10240)
    with pytest.raises(MemoryError, match=r"blocks of 32 over 66 weights need .*; what would fit: block_size=26"):
        accumulate_fisher(case.model, case.loss_fn, [case.batch], 1, 32)


@pytest.mark.parametrize("per_sample", [False, True])
def test_blocks_are_those_of_the_rows(per_sample):
    case = mlp(50)
    options = {"per_sample": per_sample, "masks": {"0.weight": torch.rand(7, 5) > 0.5}, "cycle": True}
    rows = collect_gradients(case.model, case.loss_fn, case.batches(25), 70, **options)
    blocks = accumulate_fisher(case.model, case.loss_fn, case.batches(25), 70, 4, **options)
    expected = FisherBlocks(rows.shape[1], 4, [rows.shape[1] - 31, 7, 21, 3])
    expected.add(rows)
    assert blocks.num_grads == 70
    torch.testing.assert_close(blocks.sums, expected.sums)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("progress", [None, False, True])
def test_a_bar_on_a_terminal_or_where_it_is_asked_for(capfd, monkeypatch, progress, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    case = mlp()
    collect_gradients(case.model, case.loss_fn, [case.batch] * 3, 3, progress=progress)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("3/3" in err) is (err != "") is (terminal if progress is None else progress)


def test_a_bar_without_rich(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    case = mlp()
    with pytest.raises(ValueError, match=r"progress=True needs rich.*pip install 'torch-mfac\[progress\]'"):
        collect_gradients(case.model, case.loss_fn, [case.batch], 1, progress=True)
    assert collect_gradients(case.model, case.loss_fn, [case.batch], 1).shape == (1, 66)


ROWS, WIDTH = 96, 700
ROW = 498_000 * 4 / 2**20


def measure(mode, path):
    """By how many MiB the peak of this process rises while gradients are collected."""
    torch.manual_seed(0)
    narrow, model = (nn.Sequential(nn.Linear(WIDTH, n), nn.ReLU(), nn.Linear(n, 10)) for n in (3, WIDTH))
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
    batches = [(inputs, targets)] if mode == "sample" else list(zip(inputs.split(1), targets.split(1), strict=True))
    # Modules are imported here; not for the model itself, since memory that its rows leave would hide those to come.
    collect_gradients(narrow, cross_entropy, batches, 2, per_sample=mode == "sample")
    before = peak()
    if mode == "blocks":
        accumulate_fisher(model, cross_entropy, batches, 4 * ROWS, 4, cycle=True)
    else:
        collect_gradients(model, cross_entropy, batches, ROWS, per_sample=True)
    path.write_text(str(peak() - before))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("mode", "rows"), [("sample", 96 + 8), ("blocks", 4 * 32)])  # blocks: in chunks of 32
def test_the_peak_is_that_of_the_rows_and_a_chunk(mode, rows, tmp_path):
    assert in_process(measure, mode, tmp_path / "rise") == 0
    assert float((tmp_path / "rise").read_text()) < rows * ROW

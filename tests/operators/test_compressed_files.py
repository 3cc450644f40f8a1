"""Files of int8 and top-k rows: exact for the rows as stored, page by page, gone on with bit for bit, checked."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import oracle
import pytest
import torch
from cases import mixed
from interrupted_run import NUM_GRADS, collect
from models import mlp

import mfac
from mfac.gradient_file import HEADER_BYTES, GradientFile
from mfac.windows import as_kind

M, D = 7, 45
KINDS = {
    "int8": torch.int8,
    "int8 in blocks": mfac.Int8(block=16),
    "int8, stochastic": mfac.Int8(block=16, stochastic=True, seed=5),
    "top-k": mfac.TopK(0.2, block=16),
    "top-k in float32": mfac.TopK(0.2, block=7, dtype=torch.float32),
    "one percent": mfac.TopK(),
    "all entries": mfac.TopK(1.0, block=16, dtype=torch.float32),
}
compressed = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gradients.rows"


def as_stored(kind, rows):
    """What a window reads back as; one that is new for every row where errors would be handed on."""
    window = as_kind(kind).build(len(rows), rows.shape[1], torch.device("cpu"))
    for k, row in enumerate(rows):
        if isinstance(kind, mfac.TopK):
            window = as_kind(kind).build(len(rows), rows.shape[1], torch.device("cpu"))
        window.write(k, window.encode(row))
        rows = torch.cat([rows[:k], window.row(k)[None], rows[k + 1 :]])
    return rows


def written(path, kind, rows):
    file = GradientFile.create(path, len(rows), rows.shape[1], kind, "made of this")
    file.append(rows[0])
    file.append(rows[1:4])
    file.append(rows[4:])
    return GradientFile(path)


@compressed
def test_rows_are_those_that_a_window_stores(path, kind):
    rows = mixed(M, D)
    file, stored = written(path, kind, rows), as_stored(kind, rows)
    assert (file.shape, file.dtype, file.fingerprint) == ((M, D), torch.float32, "made of this")
    assert torch.equal(file.read_rows(0, M), stored)
    assert torch.equal(file.read_rows(2, 3), stored[2:3])
    for start, stop in ((0, D), (0, 1), (15, 17), (16, 32), (20, 44), (44, D), (9, 9)):
        assert torch.equal(file.read_columns(start, stop), stored[:, start:stop])
    indices = torch.tensor([44, 0, 16, 15, 0, 31])
    assert torch.equal(file.gather_columns(indices), stored[:, indices])


@compressed
def test_the_file_takes_the_bytes_of_the_window(path, kind):
    file = written(path, kind, mixed(M, D))
    vectors = 4 * D if isinstance(kind, mfac.TopK) else 0  # the error, which a file does not have
    assert path.stat().st_size - HEADER_BYTES == as_kind(kind).bytes(M, D) - vectors
    assert file.storage == as_kind(kind).name
    assert file.storage in repr(file)


@compressed
@pytest.mark.parametrize("page_size", [None, 1, 10])
@pytest.mark.parametrize("block_size", [None, 4, 20])
def test_answers_are_exact_for_the_rows_as_stored(path, kind, page_size, block_size):
    file = written(path, kind, mixed(M, D))
    op = mfac.StaticInverseFisher(file, 1e-3, page_size=page_size, block_size=block_size)
    blocks = None if block_size is None else [(k, min(k + block_size, D)) for k in range(0, D, block_size)]
    truth, logdet = oracle.inverse(oracle.fisher(file.read_rows(0, M), 1e-3, blocks=blocks))
    x = mixed(1, D, seed=3)[0]
    assert oracle.error(op @ x, truth @ oracle.wide(x)) < 1e-4
    assert oracle.worst(op.diagonal(), truth.diagonal()) < 1e-4
    assert float(op.logdet()) == pytest.approx(float(logdet), rel=1e-6)
    at = torch.tensor([0, 17, 44])
    assert oracle.error(op[at, at], truth[at, at]) < 1e-4


@pytest.mark.parametrize("kind", [mfac.Int8(block=8), mfac.TopK(0.3, block=16)], ids=["int8", "top-k"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_the_collector_stores_as_asked(path, kind, per_sample):
    case = mlp(12)
    options = {"per_sample": per_sample, "cycle": True, "masks": {"0.weight": torch.arange(35).view(7, 5) % 3 > 0}}
    rows = mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 12, **options)
    file = mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 12, out=path, window=kind, **options)
    assert torch.equal(file.read_rows(0, 12), as_stored(kind, rows))


def test_a_plain_window_is_a_dtype(path):
    case = mlp()
    file = mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, out=path, window=torch.bfloat16)
    again = mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, out=path, dtype=torch.bfloat16)
    assert file.dtype == again.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["int8", "topk"])
@pytest.mark.parametrize("torn_rows", [0.5, 6.3, 99])
def test_a_run_that_lost_its_tail_goes_on_bit_for_bit(path, kind, torn_rows):
    collect(str(path), "sample", kind)
    whole = path.read_bytes()
    row = (len(whole) - HEADER_BYTES) // NUM_GRADS
    os.truncate(path, len(whole) - int(torn_rows * row))
    collect(str(path), "sample", kind)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_killed_at_random_then_finished_bit_for_bit(path, tmp_path, kind):
    collect(str(tmp_path / "whole"), "sample", kind)
    whole = (tmp_path / "whole").read_bytes()
    size = HEADER_BYTES + random.Random(kind).uniform(0.1, 0.9) * (len(whole) - HEADER_BYTES)
    script = Path(__file__).parents[1] / "support" / "interrupted_run.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path])}
    process = subprocess.Popen([sys.executable, str(script), str(path), "sample", kind], env=environment)
    while process.poll() is None and (not path.exists() or path.stat().st_size < size):
        time.sleep(0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    collect(str(path), "sample", kind)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("other", [None, torch.int8, mfac.Int8(seed=1, stochastic=True), mfac.TopK(0.02)], ids=str)
def test_a_file_stored_otherwise_is_refused(path, other):
    case = mlp()
    mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, out=path, window=mfac.TopK())
    with pytest.raises(ValueError, match=r"something else: dtype or window \(mfac.TopK\(0.01\) there, .* now\)"):
        mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, out=path, window=other)


def test_a_window_without_a_file():
    case = mlp()
    with pytest.raises(ValueError, match=r"says how a file stores rows, and there is none; pass out="):
        mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, window=torch.int8)


def test_a_window_and_a_dtype(path):
    case = mlp()
    with pytest.raises(ValueError, match=r"both say how rows are stored; pass one of them"):
        mfac.collect_gradients(
            case.model, case.loss_fn, [case.batch], 1, out=path, window=torch.int8, dtype=torch.float32
        )


def test_a_window_that_is_none(path):
    case = mlp()
    with pytest.raises(ValueError, match=r"rows can be stored in .* not torch.int32"):
        mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, out=path, window=torch.int32)


def test_int8_is_no_dtype_of_rows(path):
    case = mlp()
    with pytest.raises(ValueError, match=r"or store them in a file with out=... and window=torch.int8"):
        mfac.collect_gradients(case.model, case.loss_fn, [case.batch], 1, dtype=torch.int8)


@pytest.mark.parametrize("kind", [torch.int8, mfac.TopK()], ids=str)
@pytest.mark.parametrize("number", [torch.inf, torch.nan, 3.402e38])
def test_a_row_that_is_not_finite_as_stored_is_refused(path, kind, number):
    rows = mixed(3, D)
    rows[1, 20] = number
    if kind == torch.int8 and number < torch.inf:
        number = rows[1, 20] = torch.finfo(torch.float32).max
    file = GradientFile.create(path, 3, D, kind)
    file.append(rows[0])
    with pytest.raises(ValueError, match=r"row 1 is not finite in .*; leave it out"):
        file.append(rows[1])
    assert GradientFile(path).rows == 1


def test_a_format_of_a_later_version(path):
    GradientFile.create(path, 1, 1)
    header = json.dumps({"num_grads": 1, "dim": 1, "dtype": "int2", "fingerprint": ""}).encode()
    path.write_bytes((b"MFACROWS" + header).ljust(HEADER_BYTES))
    with pytest.raises(ValueError, match="stores rows as 'int2', which this version does not know; update mfac"):
        GradientFile(path)

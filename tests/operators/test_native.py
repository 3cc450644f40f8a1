"""Compiled products: those of the rows as stored, however divided; torch's where there is no library."""

import shutil
import subprocess
import tempfile
from unittest.mock import Mock

import pytest
import torch
from cases import mixed, stored

import mfac
from mfac.windows import native

M, D = 21, 9000  # two whole strips and a rest; a rest of rows too
KINDS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "int8 in short blocks": mfac.Int8(block=37),
    "int8 in one block": mfac.Int8(block=10_000),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="there is no C compiler")


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    monkeypatch.setattr(native, "LEAST_NUMBERS", 0)


@needs_compiler
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_the_rows_as_stored(kind, dtype):
    rows, _ = stored(mixed(M, D, 3.0), kind)
    assert rows.compiled(dtype) == (kind != dtype)  # torch can multiply equal dtypes
    for n in (1, 4, 19, M):
        G, x, a = rows.columns(n, 0, D).double(), torch.randn(D, 2)[:, 1], torch.randn(n, 2, dtype=torch.float64)[:, 1]
        projected, combined = rows.project(n, x, dtype), rows.combine(a, dtype)
        assert (projected.dtype, combined.dtype) == (torch.float64, dtype)
        near = 1e-6 if dtype == torch.float32 else 1e-14  # of the sizes of what is summed
        assert ((projected - G @ x.double()).abs() <= near * (G.abs() @ x.double().abs())).all()
        assert ((combined.double() - G.T @ a).abs() <= near * (G.abs().T @ a.abs()) + 1e-30).all()


@needs_compiler
def test_every_float16_and_bfloat16_is_read_as_what_it_is():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        G = bits.view(dtype)
        G = G[G.isfinite()][None]
        assert torch.equal(native.Stored(G).combine(torch.ones(1), torch.float32), G[0].float())


@needs_compiler
@every_kind
def test_nothing_depends_on_the_number_of_threads(kind, monkeypatch):
    (rows, _), x, a = stored(mixed(M, D, 3.0), kind), torch.randn(D), torch.randn(M, dtype=torch.float64)
    answers = []
    for threads in (1, 2, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        answers.append((rows.project(M, x, torch.float64), rows.combine(a, torch.float64)))
    assert all(torch.equal(one, first) for answer in answers for one, first in zip(answer, answers[0], strict=True))


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (shutil, "which", lambda name: None),
        (subprocess, "run", Mock(side_effect=subprocess.CalledProcessError(1, "cc"))),
        (subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("cc", 10))),
        (subprocess, "run", lambda *args, **options: None),  # which leaves no library
        (tempfile, "mkdtemp", Mock(side_effect=FileNotFoundError("no usable temporary directory found"))),
        (native, "SOURCE", native.SOURCE.with_name("nowhere.c")),
        (native, "_allowed", False),
    ],
    ids=["no compiler", "fails", "too slow", "nothing compiled", "no folder", "no source", "not allowed"],
)
def test_without_a_library_products_are_those_of_torch(place, name, instead, monkeypatch):
    monkeypatch.setattr(native, "_compiled", native._compiled.__wrapped__)  # nothing has been compiled yet
    monkeypatch.setattr(place, name, instead)
    op = mfac.DynamicInverseFisher(4, 50, 1e-2, window=torch.bfloat16)
    for row in mixed(4, 50):
        step = op.update_and_apply(row)
    assert not op.compiled
    assert torch.allclose(step, mfac.StaticInverseFisher(op.rows, 1e-2) @ op.rows[3].float(), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_compiled_code_can_be_forbidden_and_allowed_again():
    op = mfac.DynamicInverseFisher(4, 50, 1e-2, window=torch.int8)
    assert op.compiled
    mfac.native.allow(False)
    try:
        assert not op.compiled
    finally:
        mfac.native.allow(True)
    assert op.compiled

"""Compiled products: those of the rows as stored, however divided, and torch's where there is no compiler."""

import shutil
import subprocess

import oracle
import pytest
import torch
from cases import mixed
from compiler import needs_compiler

import mfac
from mfac import native
from mfac.windows import as_kind

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
pytestmark = pytest.mark.usefixtures("compiled_at_any_size")


@pytest.fixture
def fresh():
    """As in a process that has compiled nothing yet."""
    native.compiled.cache_clear()
    yield
    native.compiled.cache_clear()


def rows_of(kind, count=M):
    rows = as_kind(kind).build(M, D, torch.device("cpu"))
    for k, g in enumerate(mixed(count, D, 3.0)):
        rows.write(k, rows.encode(g))
    return rows


@needs_compiler
@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 4, 19, M])
def test_products_are_those_of_the_rows_as_stored(kind, dtype, n):
    rows = rows_of(kind)
    if kind == dtype:
        assert rows._compiled(dtype) is None  # torch has this one
        return
    assert rows._compiled(dtype) is not None
    G, x, a = rows.dense().double()[:n], torch.randn(D), torch.randn(n, dtype=torch.float64)
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
        found = native.find(torch.float32, G, (1, G.shape[1])).combine(torch.ones(1, dtype=torch.float64))
        assert torch.equal(found, G[0].float())


@needs_compiler
@every_kind
def test_nothing_depends_on_the_number_of_threads(kind, monkeypatch):
    rows, x, a = rows_of(kind), torch.randn(D), torch.randn(M, dtype=torch.float64)
    answers = []
    for threads in (1, 2, 3, 7, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        answers.append((rows.project(M, x, torch.float64), rows.combine(a, torch.float64)))
    for projected, combined in answers:
        assert torch.equal(projected, answers[0][0])
        assert torch.equal(combined, answers[0][1])


@needs_compiler
@every_kind
@pytest.mark.parametrize("precision", ["auto", "float64"])
def test_the_operator_is_exact_for_the_rows_as_stored(kind, precision):
    op = mfac.DynamicInverseFisher(5, 300, 1e-2, window=kind, precision=precision)
    for g in mixed(8, 300):
        step = op.update_and_apply(g)
    dense, _ = oracle.inverse(oracle.fisher(op.rows, 1e-2))
    x = torch.randn(300)
    assert oracle.error(step, dense @ oracle.wide(op.rows[7 % 5])) < 1e-5
    assert oracle.error(op @ x, dense @ oracle.wide(x)) < 1e-4


@needs_compiler
@every_kind
def test_saved_and_loaded_goes_on_bit_for_bit(kind):
    op, other = (mfac.DynamicInverseFisher(5, 300, 1e-2, window=kind) for _ in range(2))
    rows = mixed(20, 300)
    for row in rows[:9]:
        op.update_and_apply(row)
    other.load_state_dict(op.state_dict())
    for row in rows[9:]:
        assert torch.equal(op.update_and_apply(row), other.update_and_apply(row))


@needs_compiler
def test_a_vector_that_is_no_piece_of_memory_is_copied():
    rows, x, a = rows_of(torch.bfloat16), torch.randn(D, 2), torch.randn(M, 2, dtype=torch.float64)
    G = rows.dense().double()
    assert torch.allclose(rows.project(M, x[:, 1], torch.float64), G @ x[:, 1].double())
    assert torch.allclose(rows.combine(a[:, 1], torch.float64), G.T @ a[:, 1])


@needs_compiler
def test_small_windows_compile_nothing(monkeypatch):
    monkeypatch.undo()
    assert rows_of(torch.bfloat16)._compiled(torch.float32) is None


def refuse(*args, **options):
    raise subprocess.CalledProcessError(1, "cc")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (shutil, "which", lambda name: None),
        (subprocess, "run", refuse),
        (subprocess, "run", lambda *args, **options: None),  # and there is no library
        (native, "SOURCE", native.SOURCE.with_name("nowhere.c")),
        (native, "_allowed", False),
    ],
    ids=["no compiler", "compiler fails", "nothing compiled", "no source", "not allowed"],
)
def test_without_a_compiled_library_products_are_those_of_torch(place, name, instead, monkeypatch):
    monkeypatch.setattr(place, name, instead)
    rows, x = rows_of(torch.bfloat16), torch.randn(D)
    assert rows._compiled(torch.float32) is None
    assert torch.allclose(rows.project(M, x, torch.float32), rows.dense().double() @ x.double(), atol=1e-4)


@needs_compiler
def test_compiled_code_can_be_forbidden_and_allowed_again():
    rows = rows_of(torch.bfloat16)
    mfac.native.allow(False)
    try:
        assert rows._compiled(torch.float32) is None
    finally:
        mfac.native.allow(True)
    assert rows._compiled(torch.float32) is not None

"""Sums of squares of L X by compiled code: those of float64, whatever the shapes, and torch's where it is not for."""

import oracle
import pytest
import torch
from cases import ROWS, mixed, write
from compiler import needs_compiler
from test_small_blocks import truth

import mfac
from mfac import lower_squares, native

pytestmark = [needs_compiler, pytest.mark.usefixtures("compiled_at_any_size")]


@pytest.fixture(autouse=True)
def _for_few_rows_too(monkeypatch):
    monkeypatch.setattr(lower_squares, "LEAST_ROWS", 1)
    monkeypatch.setattr("mfac.small_blocks.MOST_ROWS", 0)


@pytest.fixture
def calls(monkeypatch):
    """The shapes that compiled code was called with."""
    shapes = []
    original = lower_squares.LowerSquares.__call__

    def counted(self, L, X, weights=None):
        shapes.append(tuple(X.shape))
        return original(self, L, X, weights)

    monkeypatch.setattr(lower_squares.LowerSquares, "__call__", counted)
    return shapes


@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 12, 23, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 200])
def test_the_sums_of_float64(m, length):
    generator = torch.Generator().manual_seed(m * length)
    L = torch.randn(3, m, m, generator=generator, dtype=torch.float64)  # what is above the diagonal is not to be read
    X, weights = torch.randn(3, m, length, generator=generator), torch.rand(m, generator=generator)
    compiled = lower_squares.find(X.numel(), m, X.dtype, X.device)
    sums, plain = compiled(L, X)
    assert sums.dtype == plain.dtype == torch.float64
    torch.testing.assert_close(sums, (L.tril() @ X.double()).square().sum(1), rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(plain, X.double().square().sum(1), rtol=1e-6, atol=1e-9)
    weighted = (weights.double()[:, None] * X.double().square()).sum(1)
    torch.testing.assert_close(compiled(L, X, weights)[1], weighted, rtol=1e-6, atol=1e-9)


def test_rows_that_lie_otherwise_and_any_number_of_threads(monkeypatch):
    L, X = torch.randn(1, 7, 7, dtype=torch.float64), torch.randn(1, 3000, 7).transpose(1, 2)
    compiled = lower_squares.find(X.numel(), 7, X.dtype, X.device)
    expected = compiled(L, X.contiguous())
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for lower in (L, L.mT.contiguous().mT):
            assert all(map(torch.equal, compiled(lower, X), expected))


@pytest.mark.parametrize("kind", [kind for kind, G in ROWS.items() if G.shape == (12, 40)])
@pytest.mark.parametrize("options", [{}, {"block_size": 20}, {"page_size": 7}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_diagonals_of_any_operator(kind, options, weighted):
    G = ROWS[kind].clone()
    weights = torch.linspace(0.5, 2, 12, dtype=torch.float64) if weighted else None
    blocks = [(0, 20), (20, 40)] if "block_size" in options else None
    expected = oracle.inverse(oracle.fisher(G, 1e-3, weights, blocks))[0].diagonal()
    bound = oracle.tolerance(G, 1e-3)
    op = mfac.StaticInverseFisher(G, 1e-3, row_weights=weights, **options)
    assert oracle.error(op.diagonal(), expected) < bound


def test_the_full_matrix_in_pieces(calls, tmp_path):
    """Of rows on disk; those in memory are not cut up."""
    G = mixed(40, 500, 0.3)
    for rows, shapes in (
        (write(G, tmp_path / "rows"), [(1, 40, 200), (1, 40, 200), (1, 40, 100)]),
        (G, [(1, 40, 500)]),
    ):
        calls.clear()
        op = mfac.StaticInverseFisher(rows, 1e-2, page_size=200)
        assert oracle.worst(op.diagonal(), truth(G, 1e-2, 500).diagonal()) < 1e-5
        assert calls == shapes


def test_where_it_is_not_for_torch_is_used(calls, monkeypatch):
    G = mixed(12, 40)
    mfac.StaticInverseFisher(G.double(), 1e-2).diagonal()
    mfac.StaticInverseFisher(G.bfloat16(), 1e-2).diagonal()
    mfac.StaticInverseFisher(G, 1e-2, precision="float64").diagonal()
    mfac.StaticInverseFisher(G, 1e-2, devices=["cpu", "cpu"]).diagonal()
    monkeypatch.setattr(lower_squares, "LEAST_ROWS", 13)
    mfac.StaticInverseFisher(G, 1e-2).diagonal()
    monkeypatch.setattr(lower_squares, "LEAST_ROWS", 1)
    monkeypatch.setattr(native, "COMPILERS", ())
    native.compiled.cache_clear()
    mfac.StaticInverseFisher(G, 1e-2).diagonal()
    native.compiled.cache_clear()
    assert calls == []

"""Small blocks by compiled code: the answers of the dense matrix, and torch's where compiled code must not be used."""

import oracle
import pytest
import torch
from cases import ROWS, duplicates, mixed, repeating
from compiler import needs_compiler

import mfac
from mfac import native, small_blocks

LAMBDA = 1e-2
pytestmark = pytest.mark.usefixtures("compiled_at_any_size")


@pytest.fixture
def calls(monkeypatch):
    """How often compiled code was called, and whether its factors were good."""
    found = {"factor": [], "squares": []}
    for name, results in found.items():
        original = getattr(small_blocks.SmallBlocks, name)

        def counted(self, *arguments, original=original, results=results, **options):
            results.append(original(self, *arguments, **options))
            return results[-1]

        monkeypatch.setattr(small_blocks.SmallBlocks, name, counted)
    return found


def truth(G, damping, block):
    d = G.shape[1]
    blocks = [(start, min(start + block, d)) for start in range(0, d, block)]
    return oracle.inverse(oracle.fisher(G, damping, blocks=blocks))[0]


@needs_compiler
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 17, 23])
@pytest.mark.parametrize(("block", "count"), [(24, 3), (37, 2), (64, 2), (65, 2), (130, 2)])
def test_answers_are_those_of_the_dense_matrix(calls, m, block, count):
    G = mixed(m, block * count, 0.3)
    op = mfac.StaticInverseFisher(G, LAMBDA, block_size=block)
    inverse = truth(G, LAMBDA, block)
    x = torch.randn(G.shape[1], generator=torch.Generator().manual_seed(1))
    assert oracle.worst(op.diagonal(), inverse.diagonal()) < 1e-5
    assert oracle.error(op @ x, inverse @ oracle.wide(x)) < 1e-5
    assert calls["factor"] == [True]
    assert len(calls["squares"]) == 1


@needs_compiler
@pytest.mark.parametrize("kind", [kind for kind, G in ROWS.items() if G.shape == (12, 40)])
@pytest.mark.parametrize("damping", [1.0, 1e-5])
def test_any_rows(kind, damping):
    """Those for which float32 is too little too, and those that are stored otherwise."""
    G = ROWS[kind]
    op, inverse = mfac.StaticInverseFisher(G, damping, block_size=20), truth(G, damping, 20)
    x = torch.randn(40, generator=torch.Generator().manual_seed(1))
    bound = oracle.tolerance(G, damping)
    assert oracle.error(op.diagonal(), inverse.diagonal()) < bound
    assert oracle.error(op @ x, inverse @ oracle.wide(x)) < bound


@needs_compiler
def test_where_float32_is_too_little_torch_goes_on_in_float64(calls):
    G = repeating(12, 40, 100.0)
    op = mfac.StaticInverseFisher(G, 1e-5, block_size=20)
    assert calls["factor"] == [False]
    assert oracle.worst(op.diagonal(), truth(G, 1e-5, 20).diagonal()) < oracle.tolerance(G, 1e-5)
    assert not calls["squares"]


@needs_compiler
def test_what_was_asked_to_be_float32_stays_in_float32(calls):
    op = mfac.StaticInverseFisher(mixed(12, 40, 10.0), 1e-5, block_size=20, precision="float32")
    assert calls["factor"] == [True]
    op.diagonal()
    assert len(calls["squares"]) == 1


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_rows_that_are_not_finite_are_named(bad, precision):
    G = mixed(12, 40)
    G[7, 33] = bad
    with pytest.raises(ValueError, match=r"\b7\b"):
        mfac.StaticInverseFisher(G, LAMBDA, block_size=20, precision=precision)


@needs_compiler
def test_a_matrix_beyond_float64_is_refused_as_by_torch():
    with pytest.raises(torch.linalg.LinAlgError, match="raise the damping"):
        mfac.StaticInverseFisher(duplicates(12, 40, 1e6), 1e-12, block_size=20)


@needs_compiler
def test_threads_do_not_change_a_bit(monkeypatch):
    G = mixed(12, 20 * 37)
    one, three = [], []
    for threads, answers in ((1, one), (3, three)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        op = mfac.StaticInverseFisher(G, LAMBDA, block_size=20)
        answers += [op.diagonal(), op @ G[0]]
    assert all(map(torch.equal, one, three))


@needs_compiler
def test_from_disk_and_in_pieces(tmp_path, calls):
    G = mixed(12, 200)
    file = mfac.GradientFile.create(tmp_path / "G.rows", *G.shape)
    file.append(G)
    paged = mfac.StaticInverseFisher(file, LAMBDA, block_size=20, page_size=40)
    whole = mfac.StaticInverseFisher(G, LAMBDA, block_size=20)
    assert torch.equal(paged.diagonal(), whole.diagonal())
    assert len(calls["factor"]) == 6


@needs_compiler
def test_another_damping(calls):
    G = mixed(12, 40)
    op = mfac.StaticInverseFisher(G, LAMBDA, block_size=20)
    op.damping = 0.5
    assert oracle.worst(op.diagonal(), truth(G, 0.5, 20).diagonal()) < 1e-5
    assert len(calls["squares"]) == 1


def test_where_it_is_not_for_torch_is_used(calls, monkeypatch):
    G = mixed(12, 40)
    mfac.StaticInverseFisher(G, LAMBDA, block_size=20, row_weights=torch.rand(12)).diagonal()  # rows of unequal weight
    mfac.StaticInverseFisher(G.double(), LAMBDA, block_size=20).diagonal()
    mfac.StaticInverseFisher(G, LAMBDA, block_size=20, precision="float64").diagonal()
    mfac.StaticInverseFisher(G, LAMBDA).diagonal()  # one block
    for room, name, limit in ((small_blocks, "MOST_ROWS", 11), (native, "LEAST_NUMBERS", 481)):
        with monkeypatch.context() as patch:
            patch.setattr(room, name, limit)
            mfac.StaticInverseFisher(G, LAMBDA, block_size=20).diagonal()
    assert calls == {"factor": [], "squares": []}


def test_without_a_compiler(calls, monkeypatch):
    monkeypatch.setattr(native, "COMPILERS", ())
    native.compiled.cache_clear()
    G = mixed(12, 40)
    op = mfac.StaticInverseFisher(G, LAMBDA, block_size=20)
    assert oracle.worst(op.diagonal(), truth(G, LAMBDA, 20).diagonal()) < 1e-5
    assert calls == {"factor": [], "squares": []}
    native.compiled.cache_clear()

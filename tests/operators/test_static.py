"""The static operator: what it touches, how often it reads, and what it refuses."""

import os
import pickle

import oracle
import pytest
import torch
from cases import fill, mixed
from hypothesis import given
from hypothesis import strategies as st

import mfac
from mfac.pages import BlockRun, Pages, block_runs
from mfac.static import _check_memory


@pytest.fixture
def loads(monkeypatch):
    seen, load = [], Pages.load
    monkeypatch.setattr(Pages, "load", lambda pages, columns: seen.append(columns) or load(pages, columns))
    return seen


@pytest.mark.parametrize("page_size", [1, 7, 40, 99])
def test_paging_takes_two_passes_in_all(loads, page_size):
    op = mfac.StaticInverseFisher(mixed(12, 40), 1e-2, page_size=page_size)
    op.diagonal()
    op.diagonal()
    assert sum(columns.stop - columns.start for columns in loads) == 2 * 40
    assert max(columns.stop - columns.start for columns in loads) <= page_size


def test_blocks_in_the_primal_need_the_gradients_once(loads):
    grads, x = mixed(12, 40), torch.randn(40)
    op = mfac.StaticInverseFisher(grads, 1e-2, block_size=8, page_size=16)
    op.diagonal()
    before = op @ x
    grads.zero_()
    assert torch.equal(op @ x, before)
    assert sum(columns.stop - columns.start for columns in loads) == 40


@pytest.mark.parametrize(("norm", "damping", "fits"), [(0.1, 1e-2, True), (100.0, 1e-5, False)])
def test_overwrite_uses_the_memory_of_the_gradients_if_float32_can_hold_the_result(norm, damping, fits):
    grads = mixed(12, 40, norm)
    before, x = grads.clone(), grads.T @ torch.randn(12)
    op = mfac.StaticInverseFisher(grads, damping, overwrite=True)
    dense, _ = oracle.inverse(oracle.fisher(before, damping))
    assert torch.equal(grads, before) != fits
    assert oracle.error(op @ x, dense @ oracle.wide(x)) < 1e-4
    assert float(op[3, 7]) == pytest.approx(float(dense[3, 7]), rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"block_size": 15}, {"page_size": 7}, {"overwrite": True}])
def test_gradients_modified_afterwards_are_noticed(options):
    grads = mixed(12, 40)
    op = mfac.StaticInverseFisher(grads, 1e-2, **options)
    grads[0] = 0
    with pytest.raises(RuntimeError, match=r"modified in place.*build it anew, or give it a copy"):
        op @ torch.randn(40)


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: data[:-4] + b"\0\0\0\0"])
def test_a_file_that_is_not_complete_is_refused_and_one_modified_afterwards_is_noticed(tmp_path, damage):
    path = tmp_path / "rows"
    file = mfac.GradientFile.create(path, 12, 40)
    file.append(mixed(12, 40)[:5])
    with pytest.raises(ValueError, match="has 5 of 12 rows; finish collecting it"):
        mfac.StaticInverseFisher(file)
    file.append(mixed(12, 40)[5:])
    os.utime(path, ns=(0, 0))  # long ago: clocks of file systems may stand still between two writes
    op = mfac.StaticInverseFisher(file, 1e-2)
    assert torch.equal(pickle.loads(pickle.dumps(op)) @ torch.ones(40), op @ torch.ones(40))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RuntimeError, match=r"modified in place \(or their file was\).*build it anew"):
        op @ torch.ones(40)
    with pytest.raises(ValueError, match="rows have changed since it was built"):
        mfac.leave_out(op, 0)


def test_gradients_that_require_grad_and_vectors_that_are_parameters_are_only_read():
    grads, theta = mixed(12, 40).requires_grad_(), torch.nn.Parameter(torch.randn(40))
    op = mfac.StaticInverseFisher(grads, 1e-2)
    assert not (op @ theta).requires_grad
    with pytest.raises(ValueError, match=r"part of an autograd graph.*x\.detach\(\)"):
        op @ (2 * theta)


def test_a_damping_and_weights_that_are_changed_afterwards_change_no_answer():
    damping, weights, x = torch.tensor(1e-2), torch.rand(12, dtype=torch.float64), torch.randn(40)
    op = mfac.StaticInverseFisher(mixed(12, 40), damping, row_weights=weights)
    before = op @ x, mfac.leave_out(op, 3) @ x
    damping.fill_(5.0)
    weights.zero_()
    assert torch.equal(op @ x, before[0])
    assert torch.equal(mfac.leave_out(op, 3) @ x, before[1])


@pytest.mark.parametrize(("where", "bad"), [((0, 3), float("nan")), ((7, 39), float("inf")), ((11, 0), -float("inf"))])
@pytest.mark.parametrize("options", [{}, {"block_size": 8}, {"block_size": 15}, {"page_size": 6}])
def test_gradients_that_are_not_finite_are_refused_by_row(where, bad, options):
    grads = mixed(12, 40)
    grads[where] = bad
    with pytest.raises(ValueError, match=f"not finite .* in 1 of 12 rows, the first in row {where[0]};"):
        mfac.StaticInverseFisher(grads, 1e-2, **options)


LARGE = 1e20 * torch.ones(3, 16)


@pytest.mark.parametrize(
    ("grads", "options", "message"),
    [
        (torch.ones(40), {}, r"grads must be \[m, d\] .*, not \[40\]"),
        (torch.ones(0, 40), {}, r"at least one gradient and one weight, not \[0, 40\]"),
        (torch.ones(12, 40, dtype=torch.int64), {}, "grads .* must be a dense floating-point tensor, not torch.int64"),
        ([[1.0]], {}, r"grads .* must be a dense floating-point tensor, not list"),
        (mixed(12, 40).to_sparse(), {}, r"not a torch.sparse_coo one; convert with \.to_dense"),
        (mixed(12, 40).to("meta"), {}, "must be a dense floating-point tensor, not one on the meta device"),
        (mixed(12, 40), {"damping": True}, "damping must be positive and finite, not True"),
        (mixed(12, 40), {"damping": 1e-300}, "damping 1e-300 is too small: answers grow to 1/damping"),
        (mixed(12, 40), {"damping": float("nan")}, "damping must be positive and finite, not nan"),
        (mixed(12, 40), {"damping": "small"}, "damping must be a positive number, not 'small'"),
        (mixed(12, 40), {"damping": "0.1"}, "damping must be a positive number, not '0.1'"),
        (mixed(12, 40), {"damping": torch.tensor(1j)}, "damping must be a positive number, not tensor"),
        (mixed(12, 40), {"block_size": 0}, "block_size must be a positive int or None .*, not 0"),
        (mixed(12, 40), {"sizes": [40]}, "sizes was given without block_size"),
        (mixed(12, 40), {"block_size": 8, "sizes": [30]}, "add up to the 40 columns; they add up to 30"),
        (mixed(12, 40), {"block_size": 8, "sizes": [60, -20]}, "add up to the 40 columns; one is -20"),
        (mixed(12, 40), {"page_size": 0}, "page_size must be a positive int, not 0"),
        (mixed(12, 40), {"precision": "half"}, "precision must be one of 'auto', 'float32', 'float64', not 'half'"),
        (LARGE, {"precision": "float32"}, 'too large to be squared in float32; use precision="auto"'),
        (LARGE, {"precision": "float32", "block_size": 8}, 'too large to be squared in float32; use precision="auto"'),
        (mixed(12, 40), {"row_weights": torch.ones(11)}, r"row_weights must be \[12\].*, not \[11\]"),
        (mixed(12, 40), {"row_weights": -torch.ones(12)}, "row_weights must be finite and not negative"),
    ],
)
def test_bad_arguments_are_refused(grads, options, message):
    with pytest.raises(ValueError, match=message):
        mfac.StaticInverseFisher(grads, **options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(39), r"x must be \[40\] or \[40, k\], not \[39\]"),
        (torch.ones(40, dtype=torch.int32), "x must be a dense floating-point tensor, not torch.int32"),
        (torch.ones(40).to(torch.float8_e4m3fn), "x must be a dense floating-point tensor, not torch.float8_e4m3fn"),
        (torch.ones(40).numpy(), "x must be a dense floating-point tensor, not ndarray; convert with torch.as_tensor"),
        (torch.ones(40).to_sparse(), r"not a torch.sparse_coo one; convert with \.to_dense"),
        (torch.eye(40)[:, :2] * torch.nan, "the vector has numbers that are not finite"),
        (1 / torch.arange(80.0).view(40, 2), "the vector has numbers that are not finite"),
    ],
)
def test_bad_vectors_are_refused(x, message):
    op = mfac.StaticInverseFisher(mixed(12, 40))
    for call in (op.__matmul__, op.quadratic_form, op.solve, lambda x: x @ op if x.ndim == 1 else op @ x):
        with pytest.raises(ValueError, match=message):
            call(x)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 40), "index 40 is out of range for 40 weights"),
        ((torch.tensor([1, 99]), torch.tensor([1, 2])), "index 99 is out of range"),
        ((torch.tensor([1, 2]), torch.tensor([1, 2, 3])), r"must have one shape, not \[2\] and \[3\]"),
        ((slice(0, 3), 1), "slices are not supported"),
        ((0.5, 1), "indices must be integers, not torch.float32"),
        (3, "an element has two indices"),
    ],
)
def test_bad_indices_iteration_and_complex_vectors_are_refused(index, message):
    op = mfac.StaticInverseFisher(mixed(12, 40))
    with pytest.raises(IndexError, match=message):
        op[index]
    with pytest.raises(TypeError, match="not iterable"):
        list(op)
    with pytest.raises(TypeError, match="complex"):
        op.as_scipy() @ torch.ones(40, dtype=torch.complex128).numpy()


def test_more_memory_than_there_is_is_refused_with_what_would_fit(monkeypatch):
    monkeypatch.setattr("mfac.static.available_memory", lambda device: 1000)
    message = r"needs .* \(.* for its factors, 0.0 MiB to move .* what would fit: fewer gradients"
    with pytest.raises(MemoryError, match=message):
        mfac.StaticInverseFisher(mixed(12, 40))
    monkeypatch.setattr("mfac.static.available_memory", lambda device: 2000)
    for block_size in (10, 20):
        with pytest.raises(MemoryError, match="what would fit: block_size=3"):
            mfac.StaticInverseFisher(mixed(12, 40), block_size=block_size)
    mfac.StaticInverseFisher(mixed(12, 40), block_size=3)
    monkeypatch.setattr("mfac.static.available_memory", lambda device: 4000)
    with pytest.raises(MemoryError, match=r"1.0 MiB to move the gradients there.*what would fit: page_size=9 "):
        _check_memory([BlockRun(0, 20_000, 1)], 2, 2**20, torch.device("meta"))
    op = mfac.StaticInverseFisher(mixed(12, 40))
    monkeypatch.setattr("mfac.inverse_fisher.available_memory", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"the dense 40 x 40 matrix takes .*use op @ x"):
        op.to_dense()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_damping_that_fails_leaves_the_old_one(kind):
    rows, x = torch.full((12, 40), 1e3, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    op = mfac.StaticInverseFisher(rows, 1e-2, block_size=15)
    if kind == "dynamic":
        op = fill(mfac.DynamicInverseFisher(12, 40, 1e-2, dtype=torch.float64), rows)
    before = op @ x
    with pytest.raises(torch.linalg.LinAlgError, match="not positive definite"):
        op.damping = 1e-300
    assert op.damping == 1e-2
    assert torch.allclose(op @ x, before)


def test_summed_blocks_refuse_what_is_for_gradients():
    with torch.inference_mode():
        sums = mfac.FisherBlocks(40, 7)
    with pytest.raises(ValueError, match="hold no gradient yet"):
        mfac.StaticInverseFisher(sums)
    sums.add(mixed(3, 40).requires_grad_())
    assert not any(part.requires_grad for part in sums.sums)
    for options in ({"block_size": 7}, {"row_weights": torch.ones(3)}, {"overwrite": True}):
        with pytest.raises(ValueError, match="already have their blocks"):
            mfac.StaticInverseFisher(sums, **options)
    with pytest.raises(ValueError, match=r"rows must be \[k, 40\], not \[3, 39\]"):
        sums.add(torch.ones(3, 39))
    with pytest.raises(ValueError, match="row 1 of the rows to be added is not finite"):
        sums.add(torch.tensor([[1.0], [float("nan")]]).expand(2, 40))
    assert sums.num_grads == 3
    sums.add(torch.full((300, 40), 1e153, dtype=torch.float64))
    with pytest.raises(ValueError, match="sums of products of gradients are not finite; scale the loss down"):
        mfac.StaticInverseFisher(sums, 1e-2)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.integers(1, 40), st.integers(1, 50))
def test_blocks_cover_every_column_once_and_never_straddle(sizes, block_size, columns):
    assert block_runs(40, 10, [10, 30]) == [BlockRun(0, 10, 4)]
    runs = block_runs(sum(sizes), block_size, sizes)
    blocks = [(run.start + i * run.length, run.length) for run in runs for i in range(run.count)]
    borders = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    assert [start for start, _ in blocks] == [0, *(start + length for start, length in blocks)][:-1]
    assert sum(length for _, length in blocks) == sum(sizes)
    for start, length in blocks:
        assert length <= block_size
        assert not any(start < border < start + length for border in borders)
    for run in runs:
        covered = [column for piece in run.pieces(columns) for column in range(piece.columns.start, piece.columns.stop)]
        assert covered == list(range(run.start, run.stop))

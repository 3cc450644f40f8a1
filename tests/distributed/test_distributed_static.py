"""The static operator with its columns on several ranks: the same matrix as one process has."""

import re

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import duplicates, mixed, repeating, spans

import mfac
from mfac.distributed.shares import column_shares

M, D, TENSORS = 6, 50, (33, 17)
DAMPING = 1e-3


def vectors():
    return torch.randn(D, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def shared(group, rows, block_size, options):
    """(diagonal, products, elements, quadratic forms, log-determinants) of this rank's piece, at two dampings."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    share = column_shares(TENSORS, size, block_size)[rank]
    sizes = None if block_size is None else share.sizes
    op = mfac.StaticInverseFisher(
        rows[:, share.columns].clone(), DAMPING, block_size=block_size, sizes=sizes, process_group=group, **options
    )
    assert op.shape == (len(share), len(share))
    x = vectors()[share.columns].to(op.dtype)
    i = torch.arange(len(share))
    found = []
    for damping in (DAMPING, 10 * DAMPING):
        op.damping = damping
        products = torch.cat([op @ x, (op @ x[:, 0])[:, None]], 1)
        pairs = op[i, i.flip(0)]
        found.append((op.diagonal(), products, pairs, op.quadratic_form(x), op.logdet()))
    return share, found


def alone(rows, block_size, damping, weights=None):
    blocks = None if block_size is None else spans(TENSORS, block_size)
    return oracle.inverse(oracle.fisher(rows, damping, weights, blocks))


def check(results, rows, block_size, weights=None):
    for number, damping in enumerate((DAMPING, 10 * DAMPING)):
        inverse, logdet = alone(rows, block_size, damping, weights)
        answers = torch.float64 if rows.dtype == torch.float64 else torch.float32
        limit = oracle.tolerance(rows, damping, answers)
        x = oracle.wide(vectors())
        pieces = [found[number] for _, found in results]
        assert oracle.error(torch.cat([piece[0] for piece in pieces]), inverse.diagonal()) < limit
        products = torch.cat([piece[1] for piece in pieces])
        assert oracle.error(products[:, :3], inverse @ x) < limit
        assert oracle.error(products[:, 3], inverse @ x[:, 0]) < limit
        for (share, _), piece in zip(results, pieces, strict=True):
            block = inverse[share.columns, share.columns]
            truth = block[range(len(block)), range(len(block))[::-1]]
            assert abs(oracle.wide(piece[2]) - truth).max(initial=0) < limit / damping
            assert oracle.error(piece[3], (x * (inverse @ x)).sum(0)) < limit
            assert abs(float(piece[4]) - float(logdet)) < limit * D
            # What all ranks know has the same bits on all of them.
            assert torch.equal(piece[3], pieces[0][3])
            assert torch.equal(piece[4], pieces[0][4])


@pytest.mark.parametrize(("size", "block_size"), [(2, None), (3, None), (4, None), (2, 4), (3, 15), (4, 20)])
def test_the_matrix_of_one_process(rank_pool, size, block_size):
    rows = mixed(M, D, dtype=torch.float64)
    check(rank_pool.run(size, shared, rows, block_size, {}), rows, block_size)


@pytest.mark.parametrize("options", [{"overwrite": True}, {"page_size": 5}], ids=str)
@pytest.mark.parametrize("block_size", [None, 15])
def test_overwritten_and_paged(rank_pool, options, block_size):
    rows = mixed(M, D, dtype=torch.float64)
    check(rank_pool.run(3, shared, rows, block_size, options), rows, block_size)


@pytest.mark.parametrize(
    "rows",
    [mixed(M, D), mixed(M, D, 1e2), mixed(M, D, dtype=torch.bfloat16), repeating(M, D, dtype=torch.float64)],
    ids=["float32", "huge", "bfloat16", "repeating"],
)
def test_other_rows(rank_pool, rows):
    check(rank_pool.run(2, shared, rows, None, {}), rows, None)


def test_more_rows_than_weights_and_weights_of_rows(rank_pool):
    rows, weights = mixed(70, D, dtype=torch.float64), torch.linspace(0, 0.1, 70, dtype=torch.float64)
    check(rank_pool.run(2, shared, rows, None, {"row_weights": weights}), rows, None, weights)


def test_ranks_without_a_block(rank_pool):
    """One tensor is one block, and two ranks of four have nothing."""
    rows = mixed(M, D, dtype=torch.float64)
    results = rank_pool.run(4, shared, rows, 40, {})
    assert sorted(len(share) for share, _ in results) == [0, 0, 17, 33]
    check(results, rows, 40)


def narrow(group, rows):
    share = column_shares([rows.shape[1]], dist.get_world_size(group))[dist.get_rank(group)]
    op = mfac.StaticInverseFisher(rows[:, share.columns], DAMPING, process_group=group)
    return op @ torch.ones(len(share), dtype=torch.float64), op.diagonal(), op.logdet()


def test_fewer_weights_than_ranks_of_the_full_matrix(rank_pool):
    rows = mixed(M, D, dtype=torch.float64)[:, :2]
    results = rank_pool.run(4, narrow, rows)
    inverse, logdet = oracle.inverse(oracle.fisher(rows, DAMPING))
    assert oracle.error(torch.cat([product for product, _, _ in results]), inverse.sum(1)) < 1e-10
    assert oracle.error(torch.cat([diagonal for _, diagonal, _ in results]), inverse.diagonal()) < 1e-10
    assert float(results[3][2]) == pytest.approx(float(logdet))


def refused(group, change):
    """The kinds and messages of the error of this rank, with one argument of the last rank changed."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = mixed(M, D, dtype=torch.float64)[:, column_shares([D], size)[rank].columns].clone()
    options = {"damping": DAMPING, "process_group": group}
    if rank == size - 1:
        rows, options = (rows, options | change) if isinstance(change, dict) else (change(rows), options)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        mfac.StaticInverseFisher(rows, **options)
    return type(caught.value).__name__, str(caught.value)


def fewer_rows(rows):
    return rows[:-1]


def not_a_number(rows):
    rows[2, 1] = torch.nan
    return rows


def too_large(rows):
    return 1e9 * rows[:1].repeat(M, 1)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"damping": 0.5}, "ValueError", "damping must be the same on every rank: rank 2 has 0.5"),
        (fewer_rows, "ValueError", "num_grads must be the same on every rank: rank 2 has 5"),
        ({"overwrite": True}, "ValueError", "overwrite must be the same on every rank: rank 2 has True"),
        (not_a_number, "ValueError", "not finite .* in 1 of 6 rows, the first in row 2"),
        ({"page_size": 0}, "ValueError", "page_size must be a positive number of columns, not 0"),
        (too_large, "(LinAlgError|_LinAlgError)", "not positive definite in float64"),
    ],
)
def test_what_one_rank_cannot_do_no_rank_does(rank_pool, change, kind, message):
    for found, text in rank_pool.run(3, refused, change):
        assert re.fullmatch(kind, found), (found, text)
        assert re.search(message, text), text


class Counted:
    """Counts the numbers that are summed over the ranks."""

    def __init__(self):
        self.numbers, self._sum = 0, dist.all_reduce

    def __call__(self, values, **options):
        self.numbers += values.numel()
        return self._sum(values, **options)

    def since(self):
        numbers, self.numbers = self.numbers, 0
        return numbers


def sent(group, block_size):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    share = column_shares(TENSORS, size, block_size)[rank]
    sizes = None if block_size is None else share.sizes
    counted = dist.all_reduce = Counted()
    try:
        rows = mixed(M, D)[:, share.columns]
        op = mfac.StaticInverseFisher(rows, DAMPING, block_size=block_size, sizes=sizes, process_group=group)
        built = counted.since()
        x = torch.ones(len(share), 5)
        calls = (lambda: op @ x, lambda: op @ x[:, 0], op.diagonal, lambda: op[0, 0], lambda: op.quadratic_form(x))
        numbers = []
        for call in calls:
            call()
            numbers.append(counted.since())
    finally:
        dist.all_reduce = counted._sum
    return built, *numbers


def test_how_many_numbers_are_summed(rank_pool):
    """The full matrix: m² to build it and m a vector; blocks: none but for sums over all of them."""
    assert rank_pool.run(2, sent, None) == [(M * M + 1, 5 * M, M, 0, 0, 5 * M + 5)] * 2
    assert rank_pool.run(2, sent, 15) == [(0, 0, 0, 0, 0, 5)] * 2


def dense(group):
    op = mfac.StaticInverseFisher(mixed(M, D, dtype=torch.float64), DAMPING, process_group=group)
    with pytest.raises(ValueError, match="no rank can have the dense matrix; use op @ x"):
        op.to_dense()
    with pytest.raises(ValueError, match=r"damping must be the same on every rank: rank 1 has 2\.0, rank 0 1\.0"):
        op.damping = 1.0 + dist.get_rank(group)
    return op.damping


def test_no_dense_matrix_and_one_damping(rank_pool):
    assert rank_pool.run(2, dense) == [DAMPING] * 2


def new_damping_that_fails(group):
    """A damping that is too small for the blocks of the last rank alone."""
    rank = dist.get_rank(group)
    rows = [mixed, mixed, duplicates][rank](20, 8, 1e6, dtype=torch.float64)
    op = mfac.StaticInverseFisher(rows, 1.0, block_size=8, process_group=group)
    before = op.diagonal()
    with pytest.raises(RuntimeError, match="not positive definite in float64") as caught:
        op.damping = 1e-9
    assert str(caught.value).startswith("another damping failed on rank 2" if rank < 2 else "the damped Gram")
    return op.damping, oracle.error(op.diagonal(), oracle.wide(before))


def test_a_damping_that_one_rank_cannot_take_is_taken_by_none(rank_pool):
    for damping, change in rank_pool.run(3, new_damping_that_fails):
        assert damping == 1.0
        assert change < 1e-3  # the scale of the rows leaves as many digits of the damping

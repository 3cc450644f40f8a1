"""The static operator with its columns on several ranks: the same matrix as one process has."""

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import duplicates, mixed, repeating, spans
from distributed_cases import Sent
from rank_pool import on_ranks

import mfac
from mfac.distributed.shares import column_shares

M, D, TENSORS = 6, 50, (33, 17)
DAMPING = 1e-3


def vectors(d):
    return torch.randn(D, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)[:d]


def shared(group, rows, block_size, options):
    """(diagonal, products, elements, quadratic forms, log-determinants) of this rank's piece, at two dampings."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    share = column_shares(TENSORS if rows.shape[1] == D else rows.shape[1:], size, block_size)[rank]
    sizes = None if block_size is None else share.sizes
    options = options | {"block_size": block_size, "sizes": sizes, "process_group": group}
    op = mfac.StaticInverseFisher(rows[:, share.columns].clone(), DAMPING, **options)
    assert op.shape == (len(share), len(share))
    x = vectors(rows.shape[1])[share.columns].to(op.dtype)
    i = torch.arange(len(share))
    found = []
    for damping in (DAMPING, 10 * DAMPING):
        op.damping = damping
        products = torch.cat([op @ x, (op @ x[:, 0])[:, None]], 1)
        found.append((op.diagonal(), products, op[i, i.flip(0)], op.quadratic_form(x), op.logdet()))
    return share, found


def alone(rows, block_size, damping, weights=None):
    blocks = None if block_size is None else spans(TENSORS, block_size)
    return oracle.inverse(oracle.fisher(rows, damping, weights, blocks))


def check(results, rows, block_size, weights=None):
    for number, damping in enumerate((DAMPING, 10 * DAMPING)):
        inverse, logdet = alone(rows, block_size, damping, weights)
        answers = torch.float64 if rows.dtype == torch.float64 else torch.float32
        limit = oracle.tolerance(rows, damping, answers)
        x = oracle.wide(vectors(rows.shape[1]))
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


EXACT = mixed(M, D, dtype=torch.float64)
WEIGHTS = torch.linspace(0, 0.1, 70, dtype=torch.float64)
CASES = {
    **{
        f"{size} ranks, blocks of {b}": (size, EXACT, b, {})
        for size, b in ((3, None), (4, None), (2, 4), (3, 15), (4, 20))
    },
    **{f"overwritten, blocks of {b}": (3, EXACT, b, {"overwrite": True}) for b in (None, 15)},
    **{f"paged, blocks of {b}": (3, EXACT, b, {"page_size": 5}) for b in (None, 15)},
    "fewer weights than ranks": (4, EXACT[:, :2], None, {}),
    "fewer blocks than ranks": (4, EXACT, 40, {}),  # each tensor is one
    "float32": (2, mixed(M, D), None, {}),
    "huge": (2, mixed(M, D, 1e2), None, {}),
    "bfloat16": (2, mixed(M, D, dtype=torch.bfloat16), None, {}),
    "repeating": (2, repeating(M, D, dtype=torch.float64), None, {}),
    "more rows than weights, weighted": (2, mixed(70, D, dtype=torch.float64), None, {"row_weights": WEIGHTS}),
}


@pytest.mark.parametrize(("size", "rows", "block_size", "options"), CASES.values(), ids=CASES)
def test_the_matrix_of_one_process(rank_pool, size, rows, block_size, options):
    check(rank_pool.run(size, shared, rows, block_size, options), rows, block_size, options.get("row_weights"))


REFUSED = {
    "damping must be the same on every rank: rank 2 has 0.5": {"damping": 0.5},
    "num_grads must be the same on every rank: rank 2 has 5": lambda rows: rows[:-1],
    "overwrite must be the same on every rank: rank 2 has True": {"overwrite": True},
    "not finite .* in 1 of 6 rows, the first in row 2": lambda rows: rows / (torch.arange(M) != 2)[:, None],
    "page_size must be a positive int, not 0": {"page_size": 0},
    "not positive definite in float64": lambda rows: 1e9 * rows[:1].repeat(M, 1),
}


@pytest.mark.parametrize("message", REFUSED)
@on_ranks(3)
def test_what_one_rank_cannot_do_no_rank_does(group, message):
    """With one argument of the last rank changed."""
    rows, options = EXACT[:, column_shares([D], 3)[group.rank()].columns].clone(), {"damping": DAMPING}
    if group.rank() == 2:
        change = REFUSED[message]
        rows, options = (rows, options | change) if isinstance(change, dict) else (change(rows), options)
    with pytest.raises(torch.linalg.LinAlgError if "definite" in message else ValueError, match=message):
        mfac.StaticInverseFisher(rows, **options, process_group=group)


@pytest.mark.parametrize("block_size", [None, 15])
@on_ranks(2)
def test_how_many_numbers_are_summed(group, block_size):
    """The full matrix: m² to build it and m per vector; blocks: only what is a sum over all of them."""
    share, numbers = column_shares(TENSORS, 2, block_size)[group.rank()], []

    def counted(call):
        with Sent() as sent:
            result = call()
        numbers.append(sum(count for name, count, _ in sent.messages if "allreduce" in name))
        return result

    sizes = None if block_size is None else share.sizes
    options = {"block_size": block_size, "sizes": sizes, "process_group": group}
    op = counted(lambda: mfac.StaticInverseFisher(mixed(M, D)[:, share.columns], DAMPING, **options))
    x = torch.ones(len(share), 5)
    for call in (lambda: op @ x, lambda: op @ x[:, 0], op.diagonal, lambda: op[0, 0], lambda: op.quadratic_form(x)):
        counted(call)
    assert numbers == ([0] * 5 + [5] if block_size else [M * M, 5 * M + 5, M + 1, 0, 0, 5 * M + 5])


@on_ranks(2)
def test_no_dense_matrix_and_one_damping(group):
    op = mfac.StaticInverseFisher(EXACT, DAMPING, process_group=group)
    with pytest.raises(ValueError, match="no rank can have the dense matrix; use op @ x"):
        op.to_dense()
    with pytest.raises(ValueError, match=r"damping must be the same on every rank: rank 1 has 2\.0, rank 0 1\.0"):
        op.damping = 1.0 + group.rank()
    assert op.damping == DAMPING


@on_ranks(3)
def test_a_damping_that_one_rank_cannot_take_is_taken_by_none(group):
    """It is too small for the blocks of the last rank alone."""
    rows = [mixed, mixed, duplicates][group.rank()](20, 8, 1e4, dtype=torch.float64)
    op = mfac.StaticInverseFisher(rows, 1.0, block_size=8, process_group=group)
    before = op.diagonal()
    message = "another damping failed on rank 2.*" if group.rank() < 2 else "the "
    with pytest.raises(RuntimeError, match=f"^{message}.*in float64"):
        op.damping = 1e-9
    assert op.damping == 1.0
    # The scale of the rows leaves as many digits of the damping.
    assert oracle.error(op.diagonal(), oracle.wide(before)) < 1e-3


@on_ranks(2)
def test_influence_is_that_of_one_process(group):
    tests, columns = mixed(3, D, dtype=torch.float64, seed=1), column_shares(TENSORS, 2, None)[group.rank()].columns
    expected = mfac.influence(mfac.StaticInverseFisher(EXACT, DAMPING), tests, leverage=True)
    op = mfac.StaticInverseFisher(EXACT[:, columns].clone(), DAMPING, process_group=group)
    assert torch.allclose(mfac.influence(op, tests[:, columns], leverage=True), expected, rtol=1e-8)


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (40, 0, 3, 57), (5, 128, 700)])
@pytest.mark.parametrize("block_size", [None, 7, 64])
def test_shares_follow_one_another_and_end_where_blocks_end(sizes, count, block_size):
    shares = column_shares(sizes, count, block_size)
    assert len(shares) == count
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == sum(sizes)
    assert all(sum(share.sizes) == len(share) for share in shares)
    assert all(abs(len(share) - sum(sizes) / count) <= (block_size or 1) for share in shares)
    if block_size is None:
        return
    blocks = spans(sizes, block_size)
    assert {share.start for share in shares} <= {*(start for start, _ in blocks), sum(sizes)}
    # The blocks that a rank lays over its own columns are those of the whole.
    pairs = [(share.start, span) for share in shares for span in spans(share.sizes, block_size)]
    assert [(first + start, first + stop) for first, (start, stop) in pairs] == blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], 0), "count must be a positive number of shares, not 0"),
        (([3], True), "count must be a positive number of shares, not True"),
        (([3, -1], 2), r"sizes must be lengths of tensors, not \[3, -1\]"),
        (([3], 2, 0), "block_size must be a positive int"),
    ],
)
def test_shares_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        column_shares(*arguments)

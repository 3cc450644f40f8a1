"""Columns divided among ranks or devices."""

import pytest

from mfac.distributed.shares import column_shares
from mfac.pages import block_runs


def blocks(sizes, block_size):
    """Where blocks begin."""
    starts = []
    for run in block_runs(sum(sizes), block_size, sizes):
        starts += range(run.start, run.stop, run.length)
    return starts


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
    assert {share.start for share in shares} <= {*blocks(sizes, block_size), sum(sizes)}
    # The blocks that a rank lays over its own columns are those of the whole.
    found = [share.start + start for share in shares for start in blocks(share.sizes, block_size)]
    assert found == blocks(sizes, block_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], 0), "count must be a positive number of shares, not 0"),
        (([3], True), "count must be a positive number of shares, not True"),
        (([3, -1], 2), r"sizes must be lengths of tensors, not \[3, -1\]"),
        (([3], 2, 0), "block_size must be a positive int"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        column_shares(*arguments)

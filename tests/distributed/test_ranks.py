"""What ranks tell one another, on two to four processes with gloo."""

import pytest
import torch

from mfac.columns import Ranks, ranks_of

SIZES = (2, 3, 4)


def summed(group):
    ranks = ranks_of(group)
    return ranks.sum_(torch.arange(3.0, dtype=torch.float64) + ranks.rank)


def gathered(group, lengths):
    ranks = ranks_of(group)
    piece = torch.full((lengths[ranks.rank], 2), float(ranks.rank))
    return ranks.gather(piece, lengths[: ranks.size])


def exchanged(group):
    ranks = ranks_of(group)
    pieces = [torch.full((ranks.rank + 1,), 10.0 * ranks.rank + to) for to in range(ranks.size)]
    return ranks.exchange(pieces, [rank + 1 for rank in range(ranks.size)])


def flagged(group, raised):
    ranks = ranks_of(group)
    return ranks.any(ranks.rank == raised)


def disagreed(group, odd):
    ranks = ranks_of(group)
    ranks.agree_on({"the damping": 1.0})
    with pytest.raises(ValueError, match=rf"the damping must be the same on every rank: rank {odd} has 2\.0"):
        ranks.agree_on({"the damping": 2.0 if ranks.rank == odd else 1.0})
    return True


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_the_same_bits_everywhere(rank_pool, size):
    sums = rank_pool.run(size, summed)
    assert all(torch.equal(one, sums[0]) for one in sums)
    assert torch.equal(sums[0], size * torch.arange(3.0, dtype=torch.float64) + size * (size - 1) / 2)


@pytest.mark.parametrize("lengths", [(2, 2, 2, 2), (3, 1, 0, 2)])
@pytest.mark.parametrize("size", SIZES)
def test_pieces_of_any_length_are_gathered_in_order(rank_pool, size, lengths):
    expected = torch.cat([torch.full((lengths[rank], 2), float(rank)) for rank in range(size)])
    assert all(torch.equal(found, expected) for found in rank_pool.run(size, gathered, lengths))


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_its_pieces(rank_pool, size):
    for to, found in enumerate(rank_pool.run(size, exchanged)):
        expected = [torch.full((rank + 1,), 10.0 * rank + to) for rank in range(size)]
        assert all(map(torch.equal, found, expected))


def test_a_flag_of_one_rank_is_seen_by_all(rank_pool):
    assert rank_pool.run(3, flagged, 2) == [True] * 3
    assert rank_pool.run(3, flagged, None) == [False] * 3


@pytest.mark.parametrize("odd", [1, 2])
def test_ranks_that_differ_are_told_alike(rank_pool, odd):
    assert rank_pool.run(3, disagreed, odd) == [True] * 3


def failed(group, kind):
    ranks = ranks_of(group)
    with ranks.together("the first part"):
        pass
    try:
        with ranks.together("the second part"):
            if ranks.rank == 1:
                raise kind("it broke")
    except BaseException as error:
        caught = type(error).__name__, str(error)
    return *caught, ranks.total(ranks.rank + 1)


@pytest.mark.parametrize(
    ("kind", "others"), [(ValueError, "ValueError"), (MemoryError, "MemoryError"), (KeyboardInterrupt, "RuntimeError")]
)
def test_what_fails_on_one_rank_fails_on_all(rank_pool, kind, others):
    told = (others, f"the second part failed on rank 1: {kind.__name__}: it broke", 6)
    assert rank_pool.run(3, failed, kind) == [told, (kind.__name__, "it broke", 6), told]


def of_the_first(group, dtype):
    ranks = ranks_of(group)
    values = torch.arange(6).view(2, 3).add(ranks.rank).to(dtype)
    ranks.from_first_(values.T)  # a view that is not contiguous
    return values, ranks.from_first_(torch.tensor(ranks.rank)), ranks.from_first_(torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64])
def test_values_of_the_first_rank(rank_pool, dtype):
    for values, single, nothing in rank_pool.run(3, of_the_first, dtype):
        assert torch.equal(values, torch.arange(6).view(2, 3).to(dtype))
        assert int(single) == 0
        assert not len(nothing)


def differing(group):
    ranks = ranks_of(group)
    ranks.agree_on({"one": 1, "two": [2]})
    with pytest.raises(ValueError, match="two must be the same on every rank: rank 1 has 3, rank 0 2;"):
        ranks.agree_on({"one": 1, "two": 2 + ranks.rank})
    return True


def test_the_argument_that_differs_is_named(rank_pool):
    assert rank_pool.run(2, differing) == [True] * 2


def test_alone_nothing_is_sent():
    ranks, values = Ranks(), torch.ones(2)
    assert ranks.sum_(values) is values
    assert ranks.gather(values, [2]) is values
    assert ranks.exchange([values], [2])[0] is values
    assert ranks.any(True)
    assert not ranks.any(False)
    ranks.agree_on({"anything": object()})
    assert ranks.from_first_(values) is values
    assert ranks.total(3) == 3
    with pytest.raises(ZeroDivisionError), ranks.together("something"):
        _ = 1 / 0

"""What ranks tell one another, on two to four processes with gloo."""

import pytest
import torch

from mfac.ranks import Ranks

SIZES = (2, 3, 4)


def summed(group):
    ranks = Ranks(group)
    return ranks.sum_(torch.arange(3.0, dtype=torch.float64) + ranks.rank)


def gathered(group, lengths):
    ranks = Ranks(group)
    piece = torch.full((lengths[ranks.rank], 2), float(ranks.rank))
    return ranks.gather(piece, lengths[: ranks.size])


def exchanged(group):
    ranks = Ranks(group)
    pieces = [torch.full((ranks.rank + 1,), 10.0 * ranks.rank + to) for to in range(ranks.size)]
    return ranks.exchange(pieces, [rank + 1 for rank in range(ranks.size)])


def flagged(group, raised):
    ranks = Ranks(group)
    return ranks.any(ranks.rank == raised)


def disagreed(group, odd):
    ranks = Ranks(group)
    ranks.agree("the damping", 1.0)
    with pytest.raises(ValueError, match=rf"the damping must be the same on every rank: rank {odd} has 2\.0"):
        ranks.agree("the damping", 2.0 if ranks.rank == odd else 1.0)
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


def test_alone_nothing_is_sent():
    ranks, values = Ranks(), torch.ones(2)
    assert ranks.sum_(values) is values
    assert ranks.gather(values, [2]) is values
    assert ranks.exchange([values], [2])[0] is values
    assert ranks.any(True)
    assert not ranks.any(False)
    ranks.agree("anything", object())

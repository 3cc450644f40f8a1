"""What ranks send one another, on three processes with gloo."""

import pytest
import torch

from mfac.inverse_fisher import Ranks, ranks_of


def on_three(group):
    """Sums, gathers, exchanges, flags and totals of ranks that differ."""
    ranks = ranks_of(group)
    rank, lengths = ranks.rank, [3, 0, 1]
    return {
        "sum": ranks.sum_(torch.arange(3.0, dtype=torch.float64) + rank),
        "gather": ranks.gather(torch.full((2, 2), float(rank)), [2] * 3),
        "uneven": ranks.gather(torch.full((lengths[rank],), float(rank)), lengths),
        "exchange": torch.cat(
            ranks.exchange([torch.full((rank + 1,), 10.0 * rank + to) for to in range(3)], [1, 2, 3])
        ),
        "flags": [ranks.any(rank == raised) for raised in (2, None)],
        "total": ranks.total(rank + 1),
    }


def test_what_ranks_send(rank_pool):
    for rank, found in enumerate(rank_pool.run(3, on_three)):
        assert found["sum"].tolist() == [3, 6, 9]
        assert found["gather"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert found["uneven"].tolist() == [0, 0, 0, 2]
        assert found["exchange"].tolist() == [rank, 10 + rank, 10 + rank, *[20 + rank] * 3]
        assert found["flags"] == [True, False]
        assert found["total"] == 6


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


@pytest.mark.parametrize(("kind", "others"), [(MemoryError, "MemoryError"), (KeyboardInterrupt, "RuntimeError")])
def test_what_fails_on_one_rank_fails_on_all(rank_pool, kind, others):
    told = (others, f"the second part failed on rank 1: {kind.__name__}: it broke", 6)
    assert rank_pool.run(3, failed, kind) == [told, (kind.__name__, "it broke", 6), told]


def of_the_first(group, dtype):
    ranks = ranks_of(group)
    values = torch.arange(6).view(2, 3).add(ranks.rank).to(dtype)
    ranks.from_first_(values.T)  # a view that is not contiguous
    return values, ranks.from_first_(torch.tensor(ranks.rank)), ranks.from_first_(torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_values_of_the_first_rank(rank_pool, dtype):
    for values, single, nothing in rank_pool.run(3, of_the_first, dtype):
        assert torch.equal(values, torch.arange(6).view(2, 3).to(dtype))
        assert int(single) == 0
        assert not len(nothing)


def differing(group):
    ranks = ranks_of(group)
    ranks.agree_on({"one": 1, "two": [2]})
    with pytest.raises(ValueError, match="two must be the same on every rank: rank 1 has 3, rank 0 2; pass the same"):
        ranks.agree_on({"one": 1, "two": 2 + ranks.rank})
    return True


def test_the_argument_that_differs_is_named(rank_pool):
    assert rank_pool.run(2, differing) == [True] * 2


def test_alone_nothing_is_sent():
    ranks, values = Ranks(), torch.ones(2)
    assert ranks.sum_(values) is ranks.gather(values, [2]) is ranks.from_first_(values) is values
    assert ranks.any(True)
    assert not ranks.any(False)
    assert ranks.total(3) == 3
    ranks.agree_on({"anything": object()})
    with pytest.raises(ZeroDivisionError), ranks.together("something"):
        _ = 1 / 0

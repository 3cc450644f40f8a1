"""What ranks send one another, on three processes with gloo."""

import pytest
import torch
from rank_pool import on_ranks

from mfac.inverse_fisher import Ranks, ranks_of


@on_ranks(3)
def test_what_ranks_send(group):
    ranks = ranks_of(group)
    rank, lengths = ranks.rank, [3, 0, 1]
    assert ranks.sum_(torch.arange(3.0, dtype=torch.float64) + rank).tolist() == [3, 6, 9]
    assert ranks.gather(torch.full((2, 2), float(rank)), [2] * 3)[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert ranks.gather(torch.full((lengths[rank],), float(rank)), lengths).tolist() == [0, 0, 0, 2]
    exchanged = ranks.exchange([torch.full((rank + 1,), 10.0 * rank + to) for to in range(3)], [1, 2, 3])
    assert torch.cat(exchanged).tolist() == [rank, 10 + rank, 10 + rank, *[20 + rank] * 3]
    assert [ranks.any(rank == raised) for raised in (2, None)] == [True, False]
    assert ranks.total(rank + 1) == 6


@pytest.mark.parametrize(("kind", "others"), [(MemoryError, MemoryError), (KeyboardInterrupt, RuntimeError)])
@on_ranks(3)
def test_what_fails_on_one_rank_fails_on_all(group, kind, others):
    ranks = ranks_of(group)
    with ranks.together("the first part"):
        pass
    message = "^it broke" if ranks.rank == 1 else f"the second part failed on rank 1: {kind.__name__}: it broke"
    caught = pytest.raises(kind if ranks.rank == 1 else others, match=message)
    with caught, ranks.together("the second part"):
        if ranks.rank == 1:
            raise kind("it broke")
    assert ranks.total(ranks.rank + 1) == 6


@on_ranks(2)
def test_the_argument_that_differs_is_named(group):
    ranks = ranks_of(group)
    ranks.agree_on({"one": 1, "two": [2]})
    with pytest.raises(ValueError, match="two must be the same on every rank: rank 1 has 3, rank 0 2; pass the same"):
        ranks.agree_on({"one": 1, "two": 2 + ranks.rank})


def test_alone_nothing_is_sent():
    ranks, values = Ranks(), torch.ones(2)
    assert ranks.sum_(values) is ranks.gather(values, [2]) is ranks.from_first_(values) is values
    assert ranks.any(True)
    assert not ranks.any(False)
    assert ranks.total(3) == 3
    ranks.agree_on({"anything": object()})
    with pytest.raises(ZeroDivisionError), ranks.together("something"):
        _ = 1 / 0

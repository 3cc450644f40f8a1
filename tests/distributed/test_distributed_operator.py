"""The dynamic operator with its columns over ranks, or over devices of one process, against the whole one."""

import pytest
import torch
from cases import fill
from distributed_cases import Training
from rank_pool import on_ranks

from mfac import DynamicInverseFisher, Int8, TopK

D, M, LAMBDA = 23, 5, 0.1
WINDOWS = {"float64": None, "bfloat16": torch.bfloat16, "int8": Int8(block=4), "topk": TopK(0.5, block=4)}


def gradients(count=9):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def piece_of(group):
    """This rank's columns: two of them for the first, and the rest in even parts."""
    cuts = [0, 2, *(2 + (D - 2) * r // max(group.size() - 1, 1) for r in range(1, group.size()))]
    return slice(cuts[group.rank()], cuts[group.rank() + 1] if group.rank() + 1 < len(cuts) else D)


def pieces_of_everything(group, window):
    """What every method gives on this rank, after more updates than there are rows."""
    here = piece_of(group)
    options = {"dtype": torch.float64, "window": window, "process_group": group, "normalize": "full"}
    op = DynamicInverseFisher(M, here.stop - here.start, LAMBDA, **options)
    x, empty = gradients(3).T[here], (op.logdet(), op.quadratic_form(gradients(3).T[here]))
    steps = torch.stack([op.update_and_apply(g[here]) for g in gradients()])
    op.replace(2, gradients()[0][here])
    first = (op[0, 0], op[0, 1])
    figures = {"logdet": op.logdet(), "forms": op.quadratic_form(x), "gram": op.gram.clone()}
    pieces = {"rows": op.rows.double(), "steps": steps, "product": (op @ x).T, "diagonal": op.diagonal()}
    op.damping = 2 * LAMBDA
    with pytest.raises(ValueError, match=rf"{group.size()} ranks share the columns, and no rank can have the dense"):
        op.to_dense()
    return figures | {"empty": empty, "damped": op.logdet()}, pieces, first


def dense(rows, damping):
    return torch.linalg.inv(damping * torch.eye(D, dtype=torch.float64) + rows.T @ rows / M)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_side_by_side_are_the_answers_of_the_dense_matrix(rank_pool, size, window):
    """Exact for the rows as stored, however each rank has stored its part."""
    ranks = rank_pool.run(size, pieces_of_everything, WINDOWS[window])
    for figures, _, _ in ranks:
        assert torch.equal(figures["gram"], ranks[0][0]["gram"])
    whole = {name: torch.cat([pieces[name] for _, pieces, _ in ranks], -1) for name in ranks[0][1]}
    rows, figures = whole["rows"], ranks[0][0]
    inverse, x = dense(rows, LAMBDA), gradients(3).T
    close = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(whole["product"], (inverse @ x).T, **close)
    torch.testing.assert_close(whole["diagonal"], inverse.diagonal(), **close)
    torch.testing.assert_close(figures["gram"], rows @ rows.T, **close)
    torch.testing.assert_close(figures["logdet"], torch.logdet(inverse), **close)
    torch.testing.assert_close(figures["damped"], torch.logdet(dense(rows, 2 * LAMBDA)), **close)
    torch.testing.assert_close(figures["forms"], torch.einsum("dk,de,ek->k", x, inverse, x), **close)
    torch.testing.assert_close(figures["empty"][0], torch.logdet(dense(0 * rows, LAMBDA)), **close)
    torch.testing.assert_close(figures["empty"][1], x.square().sum(0) / LAMBDA, **close)
    for rank, (_, _, first) in enumerate(ranks):
        start = sum(pieces["diagonal"].numel() for _, pieces, _ in ranks[:rank])
        torch.testing.assert_close(torch.stack(first), inverse[start, start : start + 2], **close)


REFUSED = {
    "other arguments": ({"num_grads": 6}, ValueError, "the window must be the same on every rank: rank 1 has"),
    "a bad argument": ({"damping": -1.0}, ValueError, "the window must be the same on every rank: rank 1 has"),
    "no columns": ({"dim": 0}, ValueError, "dim must be a positive int, not 0"),
    "no memory": ({"dim": 10**10}, MemoryError, "a window of 5 gradients of 10000000000 weights"),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_refused_on_all(group, case):
    options, error, message = REFUSED[case]
    mine = options if group.rank() == 1 else {}
    with pytest.raises(error, match=message):
        DynamicInverseFisher(**({"num_grads": M, "dim": 4, "damping": LAMBDA, "process_group": group} | mine))


DEVICES = ["cpu", "cpu", "cpu"]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_state_goes_from_devices_to_devices_and_to_one(window):
    options = {"dtype": torch.float64, "window": WINDOWS[window], "normalize": "full"}
    op = fill(DynamicInverseFisher(M, D, LAMBDA, devices=DEVICES, **options), gradients(7))
    for where in ({"devices": DEVICES}, {"devices": ["cpu", "cpu"]}, {}):
        other = DynamicInverseFisher(M, D, LAMBDA, **where, **options)
        other.load_state_dict(op.state_dict())
        torch.testing.assert_close(other.rows, op.rows, rtol=1e-2, atol=1e-2)
    same = DynamicInverseFisher(M, D, LAMBDA, devices=DEVICES, **options)
    same.load_state_dict(op.state_dict())
    g = gradients()[8]
    assert torch.equal(same.update_and_apply(g), op.update_and_apply(g))


def test_an_optimizer_on_devices_trains_as_on_one():
    one, many = Training(None, "ddp"), Training(None, "ddp", devices=DEVICES)
    one.steps(range(12))
    many.steps(range(12))
    torch.testing.assert_close(many.weights(), one.weights(), rtol=1e-10, atol=1e-12)
    fresh = Training(None, "ddp", devices=["cpu", "cpu"])
    fresh.model.load_state_dict(many.model.state_dict())
    fresh.optimizer.load_state_dict(many.optimizer.state_dict())
    torch.testing.assert_close(fresh.steps(range(12, 20)).weights(), one.steps(range(12, 20)).weights())

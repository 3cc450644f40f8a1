"""The way out of `vmap`: the direct one and the public one do the same, and both leave `vmap` as they found it."""

import pytest
import torch
from models import CASES
from torch import Tensor
from torch.func import vmap

from mfac.gradients import collect_gradients
from mfac.gradients import outside as room
from mfac.gradients.batches import num_samples
from mfac.gradients.outside import Outside, outside

EACH = torch.zeros(3)


@pytest.fixture(params=["direct", "public"])
def way(request, monkeypatch):
    """Both ways; with this torch the direct one is there."""
    assert room.has_direct_way
    monkeypatch.setattr(room, "has_direct_way", request.param == "direct")
    return request.param


def test_the_function_sees_all_samples(way):
    seen = []

    def function(x: Tensor, factor: Tensor, power: int) -> Tensor:
        seen.append((tuple(x.shape), tuple(factor.shape)))
        return x * factor**power

    x, factor = torch.randn(5, 3, 2), torch.randn(2)
    y = vmap(lambda each, x: outside(function, x, each, factor, 2), in_dims=(0, 1))(EACH, x)
    assert seen == [((3, 5, 2), (2,))]
    assert torch.equal(y, x.movedim(1, 0) * factor**2)


def test_what_is_the_same_for_all_samples_is_expanded(way):
    x = torch.randn(4)
    y = vmap(lambda each: outside(lambda whole: whole.clone(), x, each))(EACH)
    assert torch.equal(y, x.expand(3, 4))


def test_tuples_come_back_mapped(way):
    x = torch.randn(3, 4)
    double, total = vmap(lambda each, x: outside(lambda whole: (2 * whole, whole.sum(1)), x, each))(EACH, x)
    assert torch.equal(double, 2 * x)
    assert torch.equal(total, x.sum(1))


def test_gradients_go_through(way):
    x = torch.randn(3, 4, requires_grad=True)
    y = vmap(lambda each, x: outside(torch.sin, x, each).sum())(EACH, x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, x.detach().cos())


def test_vmap_goes_on_after_an_error(way):
    def fail(x: Tensor) -> Tensor:
        raise ArithmeticError("no")

    def attempt(each: Tensor, x: Tensor) -> Tensor:
        with pytest.raises(ArithmeticError, match="no"):
            outside(fail, x, each)
        return outside(torch.neg, x, each) + x.sum()

    x = torch.randn(3, 4)
    assert torch.equal(vmap(attempt)(EACH, x), -x + x.sum(1, keepdim=True))


def test_another_transform_on_top_takes_the_public_way(monkeypatch):
    ways = []
    apply = Outside.apply
    monkeypatch.setattr(Outside, "apply", lambda *arguments: (ways.append("public"), apply(*arguments))[1])
    x, inner = torch.randn(3, 4), torch.randn(2)

    def both(each: Tensor, x: Tensor) -> Tensor:
        return vmap(lambda factor: outside(torch.neg, x, each) * factor)(inner)

    torch.testing.assert_close(vmap(both)(EACH, x), -x.unsqueeze(1) * inner.view(1, 2, 1))
    assert ways == ["public"]


@pytest.mark.parametrize("name", [name for name, build in CASES.items() if build().is_mapped])
def test_both_ways_give_the_same_bits(name, monkeypatch):
    case = CASES[name]()
    rows = []
    for has_direct_way in (True, False):
        monkeypatch.setattr(room, "has_direct_way", has_direct_way)
        count, options = num_samples(case.batch, 0), {"per_sample": True, "method": "vmap"}
        rows.append(collect_gradients(case.model, case.loss_fn, [case.batch], count, **options))
    assert torch.equal(*rows)

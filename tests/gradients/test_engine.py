"""Gradients by autograd's engine: the direct way and the public one do the same."""

import pytest
import torch
from models import CASES, mlp
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from mfac.gradients import collect_gradients
from mfac.gradients import engine as room
from mfac.gradients.engine import Engine


@pytest.fixture(params=["direct", "public"])
def way(request, monkeypatch):
    """Both ways; with this torch the direct one is there."""
    assert room._run is not None
    if request.param == "public":
        monkeypatch.setattr(room, "_run", None)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_backward(way, name):
    case = CASES[name]()
    case.model.eval()
    case.loss_fn(case.model, case.batch).backward()
    trainable = [p for p in case.model.parameters() if p.requires_grad]
    expected = torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in trainable])
    case.model.zero_grad()
    (row,) = collect_gradients(case.model, case.loss_fn, [case.batch], 1)
    torch.testing.assert_close(row, expected)


def test_leaves_edges_and_what_the_loss_does_not_depend_on(way):
    x, other = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    y = x.sin()
    of_x, of_y, of_other = Engine().gradients((y**2).sum(), (x, GradientEdge(y.grad_fn, 0), other))
    torch.testing.assert_close(of_x, 2 * x.sin() * x.cos())
    torch.testing.assert_close(of_y, 2 * y)
    assert of_other is None
    assert x.grad is None


def test_the_graph_is_freed(way):
    x = torch.randn(3, requires_grad=True)
    loss = (x**2).sum()
    Engine().gradients(loss, (x,))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        Engine().gradients(loss, (x,))


class Doubling(Function):
    """The identity, whose backward pass changes what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(2)


def test_a_backward_pass_that_changes_what_it_is_given(way):
    engine, x = Engine(), torch.tensor(3.0, requires_grad=True)
    assert [engine.gradients(Doubling.apply(x), (x,))[0].item() for _ in range(3)] == [2, 2, 2]


def test_losses_of_several_dtypes(way):
    engine, x = Engine(), torch.tensor(3.0, requires_grad=True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        (grad,) = engine.gradients((x**2).to(dtype), (x,))
        assert grad.item() == 6
        assert grad.dtype == torch.float32


def test_a_loss_that_is_complex_is_refused(way):
    x = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="real scalar outputs"):
        Engine().gradients(torch.complex(x, x), (x,))


def test_tensors_that_override_functions_are_asked():
    asked = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.tensor(3.0, requires_grad=True)
    loss = (x**2).as_subclass(Watched)
    (grad,) = Engine().gradients(loss, (x,))
    assert torch.autograd.grad in asked
    assert grad.item() == 6


def test_a_compiled_model(way):
    case = mlp()
    expected = collect_gradients(case.model, case.loss_fn, 3 * [case.batch], 3)
    compiled = torch.compile(case.model, backend="aot_eager")
    torch.testing.assert_close(collect_gradients(compiled, case.loss_fn, 3 * [case.batch], 3), expected)


def test_gradients_that_are_sparse_or_missing_are_stored_as_they_are(way):
    """In the very rows of a run where others are plain."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"sparse": nn.Embedding(6, 3, sparse=True), "plain": nn.Linear(3, 1)})

    def loss_fn(model, batch):
        found = model["sparse"](batch)
        return found.sum() if len(batch) == 1 else model["plain"](found).square().sum()

    batches = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 4])]
    rows = collect_gradients(model, loss_fn, batches, 3)
    table, weight, bias = (part.numel() for part in model.parameters())
    assert (rows[:, :table].view(3, 6, 3).abs().sum(2) > 0).nonzero().tolist() == [[0, 1], [0, 2], [1, 3], [2, 4]]
    assert torch.equal(rows[1, table:], torch.zeros(weight + bias))
    assert (rows[[0, 2], table:] != 0).all()

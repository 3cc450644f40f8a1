"""Gradients of large weights formed in the row: the same as those of `backward()`, and only where that is sure."""

import pytest
import torch
from models import CASES, Case, bert, cross_entropy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mfac.gradients import collect_gradients
from mfac.gradients.batches import cut, num_samples
from mfac.gradients.weight_uses import Lookup, Product, WeightUses
from mfac.layout import ParameterLayout


@pytest.fixture(autouse=True)
def _every_weight_is_large(monkeypatch):
    monkeypatch.setattr("mfac.gradients.weight_uses.LARGE_WEIGHT", 1)
    monkeypatch.setattr("mfac.gradients.weight_uses.NUMBERS_A_NODE", 1e-3)


def backward_row(case: Case, batch) -> Tensor:
    case.model.eval()
    case.model.zero_grad(set_to_none=True)
    case.loss_fn(case.model, batch).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in case.model.parameters() if p.requires_grad]
    case.model.zero_grad(set_to_none=True)
    return torch.cat([grad.to_dense().flatten() for grad in grads])


def found(case: Case, batch=None, dtype=None) -> dict[str, list[type]]:
    """{name of a weight: the kinds of its uses}."""
    case.model.eval()
    layout = ParameterLayout(case.model)
    loss = case.loss_fn(case.model, cut(case.batch, 0, 1) if batch is None else batch)
    places = layout.views(torch.zeros(1, layout.dim, dtype=dtype or layout.dtype))[0]
    uses = WeightUses(case.model, layout).find(loss.grad_fn, places)
    return {layout.names[position]: [type(use) for use in some] for position, some in sorted(uses.items())}


def backward_rows(case: Case) -> Tensor:
    return torch.stack([backward_row(case, cut(case.batch, i, i + 1)) for i in range(num_samples(case.batch, 0))])


def assert_rows_of_backward(case: Case, method: str = "loop") -> None:
    expected = backward_rows(case)
    rows = collect_gradients(case.model, case.loss_fn, [case.batch], len(expected), per_sample=True, method=method)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("name", CASES)
def test_models_of_every_kind(name):
    assert_rows_of_backward(CASES[name]())


@pytest.mark.parametrize("name", ["mlp", "transformer", "tied", "embedding", "packed"])
def test_memory_that_is_used_again(name, tmp_path):
    """A file's rows wait in memory that still has the numbers of others."""
    case = CASES[name]()
    expected, options = backward_rows(case), {"per_sample": True, "method": "loop"}
    file = collect_gradients(case.model, case.loss_fn, [case.batch], len(expected), out=tmp_path / "rows", **options)
    torch.testing.assert_close(file.read_rows(0, len(expected)), expected)


def test_a_row_that_is_gone_on_with_has_the_same_bits(tmp_path):
    case, path = CASES["transformer"](12), tmp_path / "rows"
    batches = [cut(case.batch, i, i + 1) for i in range(12)]
    collect_gradients(case.model, case.loss_fn, batches, 12, out=path)
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        file.truncate(len(whole) * 2 // 3)
    collect_gradients(case.model, case.loss_fn, batches, 12, out=path)
    assert path.read_bytes() == whole


def test_hugging_face_bert():
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = bert()
    assert found(case)["bert.embeddings.word_embeddings.weight"] == [Lookup]
    assert_rows_of_backward(case)


def test_which_weights_are_found():
    assert found(CASES["mlp"]()) == {"0.weight": [Product], "2.weight": [Product]}
    assert found(CASES["embedding"]()) == {"0.weight": [Lookup], "2.weight": [Product]}
    tied = CASES["tied"]()
    expected = {"embed.weight": [Product, Lookup], "position.weight": [Lookup], "mix.weight": [Product, Product]}
    assert found(tied, tied.batch[:1, :2]) == expected
    assert set(found(tied)) == {"position.weight"}  # of five tokens, more would be held than written
    assert found(CASES["frozen_backbone"]()) == {"7.weight": [Product]}
    assert found(CASES["mixed_use"]()) == {}  # one is in the loss besides, the other frozen


class Own(nn.Module):
    """A weight, and what one does with it."""

    def __init__(self, use, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


def own(use, *shape: int, batch=None) -> Case:
    """The mean of a function of a weight; the inputs are numbers, or tokens if the batch is given."""
    torch.manual_seed(0)
    batch = torch.randn(5, 8) if batch is None else batch
    return Case(Own(use, *shape), lambda m, b: (m(b) ** 2).mean(), batch)


TOKENS = torch.tensor([[1, 4, 4], [0, 2, 9], [3, 3, 3]])


def added(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(torch.ones(6), x, w.t(), beta=0.5)


UNDERSTOOD = {
    "x Wᵀ": (own(lambda x, w: x @ w.t(), 6, 8), Product),
    "x W": (own(lambda x, w: x @ w, 8, 6), Product),
    "two dimensions of samples": (own(lambda x, w: F.linear(x.view(-1, 2, 4), w), 6, 4), Product),
    "b + x Wᵀ": (own(added, 6, 8), Product),
    "changed in place": (own(lambda x, w: F.linear(x, w).relu_(), 6, 8), Product),
    "W[i]": (own(lambda x, w: F.embedding(x, w), 10, 4, batch=TOKENS), Lookup),
    "W[i] with padding": (own(lambda x, w: F.embedding(x, w, padding_idx=3), 10, 4, batch=TOKENS), Lookup),
    "W[i], sparse": (own(lambda x, w: F.embedding(x, w, sparse=True), 10, 4, batch=TOKENS), Lookup),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood(name):
    case, kind = UNDERSTOOD[name]
    assert found(case) == {"weight": [kind]}
    assert_rows_of_backward(case)


def doubled(grad: Tensor) -> Tensor:
    return 2 * grad


def hooked(x: Tensor, w: Tensor) -> Tensor:
    handle = w.register_hook(doubled)
    y = F.linear(x, w)
    y.register_hook(lambda grad: (handle.remove(), grad)[1])
    return y


def cast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w).float()


def packed_away(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return F.linear(x, w)


def penalised(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad((F.linear(x, w) ** 2).sum(), x, create_graph=True)[0]


def used_twice(x: Tensor, w: Tensor) -> Tensor:
    flipped = w.t()
    return x @ flipped + flipped.sum()


OTHERS = {
    "scaled": own(lambda x, w: torch.addmm(torch.ones(6), x, w.t(), alpha=2), 6, 8),
    "left factor": own(lambda x, w: w @ x.t(), 6, 8),
    "both factors": own(lambda x, w: x @ (w @ w.t()), 8, 8),
    "in the loss besides": own(used_twice, 6, 8),
    "computed": own(lambda x, w: F.linear(x, w.tanh()), 6, 8),
    "hooked by the loss": own(hooked, 6, 8),
    "cast": own(cast, 6, 8),
    "packed away": own(packed_away, 6, 8),
    "computed again": own(lambda x, w: checkpoint(F.linear, x, w, use_reentrant=False), 6, 8),
    "differentiated": own(penalised, 6, 8),
    "more held than written": own(lambda x, w: F.linear(x.view(-1, 2), w), 6, 2),
    "table on its side": own(lambda x, w: F.embedding(x, w.t()), 10, 10, batch=TOKENS),
    "scaled by frequency": own(lambda x, w: F.embedding(x, w, scale_grad_by_freq=True), 10, 4, batch=TOKENS),
    "no sample": own(lambda x, w: F.linear(x[:0], w).sum() + x.sum(), 6, 8),
    "no token": own(lambda x, w: F.embedding(x[:, :0], w).sum() + x.sum(), 10, 4, batch=TOKENS),
    "bag": own(lambda x, w: F.embedding_bag(x, w), 10, 4, batch=TOKENS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_to_autograd(name):
    assert found(OTHERS[name]) == {}
    assert_rows_of_backward(OTHERS[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["x Wᵀ", "W[i]"])
def test_rows_of_another_dtype_are_copied(name, dtype):
    case, _ = UNDERSTOOD[name]
    assert found(case, dtype=dtype) == {}
    row = collect_gradients(case.model, case.loss_fn, [case.batch], 1, dtype=dtype)
    assert torch.equal(row[0], backward_row(case, case.batch).to(dtype))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_modules_are_called():
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        case, calls = own(F.linear, 6, 8), []
        getattr(case.model, register)(lambda *arguments, calls=calls: calls.append(1))
        assert found(case) == {}
        assert_rows_of_backward(case)
        assert calls


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_all_modules_are_called():
    case, calls = own(F.linear, 6, 8), []
    handle = torch.nn.modules.module.register_module_full_backward_hook(lambda *arguments: calls.append(1))
    try:
        assert found(case) == {}
        with pytest.warns(UserWarning, match="every module has a backward hook"):
            collect_gradients(case.model, case.loss_fn, [case.batch], 5, per_sample=True)
    finally:
        handle.remove()
    assert calls


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_results_that_have_no_gradient(tmp_path):
    case = own(lambda x, w: NoGradient.apply(F.linear(x, w)) + w.new_ones(6, requires_grad=True), 6, 8)
    assert found(case) == {"weight": [Product]}
    for out in (None, tmp_path / "rows"):
        rows = collect_gradients(case.model, case.loss_fn, [case.batch] * 2, 2, out=out)
        assert not (rows if out is None else rows.read_rows(0, 2)).any()


def embedding_case(tokens: Tensor, scales: Tensor, padding: int | None = None) -> Case:
    """The mean of the embeddings of tokens, each times a number of its own."""
    table = nn.Embedding(10, 4, padding_idx=padding)
    return Case(table, lambda m, b: (m(b[0]) * b[1].unsqueeze(2)).sum(), (tokens, scales))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
def test_a_line_that_is_not_finite(value):
    """3e38 is, but not twice."""
    scales = torch.ones(3, 3)
    scales[2] = value
    case = embedding_case(TOKENS, scales)
    torch.nn.init.zeros_(case.model.weight)  # so that the loss is finite
    with pytest.raises(RuntimeError, match=r"(loss \(nan\)|gradient) of batch 2 is not finite; the 2 rows before"):
        collect_gradients(case.model, case.loss_fn, [cut(case.batch, i, i + 1) for i in range(3)], 3)


def test_numbers_that_are_large_but_finite():
    case = embedding_case(TOKENS[1:2], torch.full((1, 3), 3e38))
    torch.nn.init.zeros_(case.model.weight)
    row = collect_gradients(case.model, case.loss_fn, [case.batch], 1)
    assert row.max() == 3e38


def test_half_precision_that_overflows_in_the_sum():
    case = embedding_case(TOKENS[2:], torch.full((1, 3), 4e4, dtype=torch.half))
    torch.nn.init.zeros_(case.model.weight)
    case.model.half()
    with pytest.raises(RuntimeError, match="the gradient of batch 0 is not finite"):
        collect_gradients(case.model, case.loss_fn, [case.batch], 1)


@pytest.mark.parametrize("method", ["loop", "vmap"])
def test_padding_may_have_any_gradient(method):
    """Its embedding is zero, where the square root has none: autograd does not look, and passes it over."""
    table = nn.Embedding(10, 4, padding_idx=4)
    case = Case(table, lambda m, b: m(b).abs().sqrt().sum(), TOKENS)
    assert found(case) == {"weight": [Lookup]}
    assert_rows_of_backward(case, method)


class AroundATable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.table, self.after = nn.Linear(2, 1), nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(self.table(tokens)).sum() + (self.before.bias * self.after.bias).abs().sqrt().sum()


@pytest.mark.parametrize("name", ["before.bias", "after.bias"])
def test_the_numbers_around_a_table_are_looked_at(name):
    case = Case(AroundATable(), lambda m, b: m(b), TOKENS)
    assert found(case)["table.weight"] == [Lookup]
    nn.init.zeros_(case.model.get_parameter(name))
    with pytest.raises(RuntimeError, match="the gradient of batch 0 is not finite"):
        collect_gradients(case.model, case.loss_fn, [TOKENS], 1)


def test_a_graph_that_is_large_for_its_weights_is_not_read(monkeypatch):
    case = CASES["mlp"]()
    monkeypatch.setattr("mfac.gradients.weight_uses.NUMBERS_A_NODE", 9)  # of 56: six nodes at the most
    assert found(case) == {}
    monkeypatch.setattr("mfac.gradients.weight_uses.NUMBERS_A_NODE", 8)
    assert len(found(case)) == 2
    monkeypatch.setattr("mfac.gradients.weight_uses.LARGE_WEIGHT", 100)
    assert found(case) == {}


def test_masks_leave_it_to_autograd():
    case = CASES["mlp"]()
    layout = ParameterLayout(case.model, masks={"0.weight": torch.rand(7, 5) > 0.5})
    assert WeightUses(case.model, layout).find(cross_entropy(case.model, case.batch).grad_fn, ()) == {}

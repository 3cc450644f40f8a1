"""One row a sample: the mapped gradients against a loop of `backward()` calls, on models of every kind."""

import pytest
import torch
import torch.nn.utils.prune
from models import CASES, Case, backward_rows, bert, cross_entropy, mlp
from torch import Tensor, nn

from mfac.gradients import collect_gradients
from mfac.gradients.batches import cut, num_samples
from mfac.gradients.layers import RowWriter


def expected_rows(case: Case) -> Tensor:
    singles = [cut(case.batch, i, i + 1) for i in range(num_samples(case.batch, 0))]
    return backward_rows(case.model, case.loss_fn, singles)


def collect(case: Case, **options) -> Tensor:
    count = num_samples(case.batch, 0)
    return collect_gradients(case.model, case.loss_fn, [case.batch], count, per_sample=True, **options)


def assert_same_rows(rows: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


class Changing(nn.Sequential):
    """Changes the outputs of its layers in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self[0](tokens)
        hidden *= 2
        return self[2](self[1](hidden).tanh_().transpose(1, 2)).sigmoid_().mean(2)


def changing() -> Case:
    model = Changing(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Conv1d(4, 3, 3, padding=1))
    return Case(model, cross_entropy, (torch.randint(9, (6, 5)), torch.randint(3, (6,))))


MAPPED = {name: build for name, build in CASES.items() if build().is_mapped}
MAPPED |= {"bert": bert, "bert, not padded": lambda: bert(padded=False), "changing": changing}


@pytest.mark.parametrize("build", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_mapped_rows_are_those_of_backward(build, chunk_size):
    case = build()
    assert_same_rows(collect(case, method="vmap", chunk_size=chunk_size), expected_rows(case))


class Holding(nn.Module):
    """Uses its parameters through a list, where no copies of them can be put."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))
        self.held = [self.weight, self.bias]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.held[0] + self.held[1])


def hooked(register) -> Case:
    register(case := mlp())
    return case


def used_by_a_closure() -> Case:
    case = mlp()
    scale = nn.Parameter(torch.ones(3))
    case.model.register_parameter("scale", scale)
    return case._replace(loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]) * scale, b[1]))


def of_outputs(change) -> Case:
    return mlp()._replace(loss_fn=lambda m, b: nn.functional.cross_entropy(change(m(b[0])), b[1]))


def doubling(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


def backward_in_the_loss(model: nn.Module, batch) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    torch.autograd.backward(cross_entropy(model, (inputs, batch[1])), inputs=[inputs])
    return cross_entropy(model, (batch[0] + inputs.grad, batch[1]))


NO_MAP = "taken one by one, because vmap cannot map this model: "
REFERENCE = "is used through a reference outside its module"
UNMAPPED = {
    "packed sequences": (CASES["packed"], NO_MAP),
    "hook of a tensor": (lambda: hooked(lambda c: c.model[2].bias.register_hook(lambda grad: 2 * grad)),
                         "2.bias has a backward hook"),
    "hook of a module": (lambda: hooked(lambda c: c.model[1].register_full_backward_hook(lambda _, x, y: (2 * x[0],))),
                         "the module 1 has a backward hook"),
    "hook of the model": (lambda: hooked(lambda c: c.model.register_full_backward_pre_hook(lambda _, y: (2 * y[0],))),
                          "the model has a backward hook"),
    "held parameters": (lambda: mlp()._replace(model=Holding()), f"weight {REFERENCE}"),
    "a parameter in a closure": (used_by_a_closure, f"scale {REFERENCE}"),
    # Of the same factors for each sample; mapped, each would have had its own.
    "a generator": (lambda: of_outputs(lambda x: x * torch.rand(3, generator=torch.Generator().manual_seed(1))),
                    "rand draws from its own generator"),
    "hook of an output": (lambda: of_outputs(doubling), NO_MAP),
    "backward in the loss": (lambda: mlp()._replace(loss_fn=backward_in_the_loss), NO_MAP),
    "scripted": (lambda: mlp()._replace(model=torch.jit.script(mlp().model)), "it has a scripted module"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:.*torch.jit")
@pytest.mark.parametrize(("build", "message"), UNMAPPED.values(), ids=UNMAPPED)
def test_what_cannot_be_mapped_is_taken_one_by_one_with_one_warning(build, message):
    case = build()
    with pytest.warns(UserWarning, match=message) as caught:
        rows = collect(case, chunk_size=4)
    assert sum("one by one" in str(warning.message) for warning in caught) == 1
    with pytest.raises(ValueError, match=r'method="vmap" cannot map this model: .*; use method="auto"'):
        collect(case, method="vmap")
    assert_same_rows(rows, expected_rows(case))


class Caching(nn.Sequential):
    """Keeps what it has computed once, and notes that it has."""

    cached = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.cached:
            self.scale, self.cached = x.new_full((4,), 2.0), True
        return self[0](x * self.scale)


@pytest.mark.parametrize("pruned", [False, True])
def test_no_tensor_of_vmap_is_left_in_the_model(pruned):
    """Neither for the next chunk nor afterwards; hooks of torch.nn.utils.prune set `weight` as a plain attribute."""
    case = Case(Caching(nn.Linear(4, 3)), cross_entropy, (torch.randn(6, 4), torch.randint(3, (6,))))
    if pruned:
        torch.nn.utils.prune.random_unstructured(case.model[0], "weight", 0.5)
    before = case.model[0].weight.detach().clone()
    rows = collect(case, method="vmap", chunk_size=2)
    torch.testing.assert_close(case.model[0].weight.detach(), before, rtol=0, atol=0)
    assert_same_rows(rows, expected_rows(case))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_hook_of_all_modules_is_not_mapped():
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, dx, dy: None)
    try:
        with pytest.warns(UserWarning, match="taken one by one"):
            collect(mlp())
    finally:
        handle.remove()


def test_an_error_of_the_loss_itself_is_the_one_that_is_raised():
    def broken(model, batch):
        raise KeyError("no such thing in the batch")

    with pytest.raises(KeyError, match="no such thing"):
        collect(mlp()._replace(loss_fn=broken))


def test_tokens_that_repeat_are_added_in_their_order():
    """By two threads, whose samples meet in the middle of one: an addition that does not keep the order shows here."""
    tokens, gradients = torch.randint(3, (7, 64)), torch.randn(7, 64, 128)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = [torch.zeros(7, 3 * 128) for _ in range(6)]
        for rows in results:
            RowWriter(rows, {0: slice(0, 3 * 128)}).add_embedding(0, tokens, gradients, None)
    finally:
        torch.set_num_threads(threads)
    expected = torch.zeros(7, 3, 128)
    for sample in range(7):
        for token, gradient in zip(tokens[sample], gradients[sample], strict=True):
            expected[sample, token] += gradient
    assert all(torch.equal(rows, expected.flatten(1)) for rows in results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_in_another_dtype(dtype):
    case = mlp()
    rows = collect(case, dtype=dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows, collect(case).to(dtype))


def test_autocast():
    case = CASES["embedding"]()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(collect(case, method="vmap"), expected_rows(case), rtol=0.1, atol=0.02)


class Tied(nn.Sequential):
    """Reads tokens and scores classes with the same matrix, so that its rows are copied for each sample."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self[0](tokens).mean(1) @ self[0].weight[:3].t()


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 3}, {"padding_idx": -2}, {"scale_grad_by_freq": True},
     {"padding_idx": 8, "scale_grad_by_freq": True}],
)  # fmt: skip
def test_the_padding_entry_of_every_sample_has_no_gradient(options):
    tokens, embed = torch.randint(10, (6, 5)), nn.Embedding(10, 4, **options)
    tokens[:, :2] = torch.tensor([3, 8])
    for model in (Tied(embed), nn.Sequential(embed, nn.Flatten(), nn.Linear(20, 3))):
        case = Case(model, cross_entropy, (tokens, torch.randint(3, (6,))))
        assert_same_rows(collect(case, method="vmap"), expected_rows(case))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 5), torch.zeros(3)), r"batch 0 has leading dimensions \[3, 4\]"),
        ({"text": "hello"}, "batch 0 has no tensor in a dict"),
        ((torch.zeros(2, 5), ["a", "b"]), "batch 0 holds a list of 2 other things"),
        (torch.zeros(2, 5).to_sparse(), "batch 0 holds a sparse tensor; make it a dense tensor, or leave it out"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    with pytest.raises(ValueError, match=message):
        collect_gradients(mlp().model, cross_entropy, [batch], 2, per_sample=True)

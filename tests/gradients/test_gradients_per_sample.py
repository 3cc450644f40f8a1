"""One row a sample: the mapped gradients against a loop of `backward()` calls, on models of every kind."""

import warnings

import pytest
import torch
from models import CASES, Case, backward_rows, bert, cross_entropy, mlp
from torch import Tensor, nn

from mfac.gradients import collect_gradients
from mfac.gradients.batches import cut, num_samples
from mfac.gradients.layers import RowWriter
from mfac.gradients.losses import model_loss


def expected_rows(case: Case) -> Tensor:
    singles = [cut(case.batch, i, i + 1) for i in range(num_samples(case.batch, 0))]
    return backward_rows(case.model, case.loss_fn, singles)


def collect(case: Case, **options) -> Tensor:
    count = num_samples(case.batch, 0)
    return collect_gradients(case.model, case.loss_fn, [case.batch], count, per_sample=True, **options)


def assert_same_rows(rows: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("name", [name for name, build in CASES.items() if build().is_mapped])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_mapped_rows_are_those_of_backward(name, chunk_size):
    case = CASES[name]()
    assert_same_rows(collect(case, method="vmap", chunk_size=chunk_size), expected_rows(case))


@pytest.mark.parametrize("padded", [False, True])
def test_hugging_face_bert(padded):
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = bert(padded=padded)
    assert_same_rows(collect(case, method="vmap"), expected_rows(case))


def test_hugging_face_gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=8, **special)
    tokens = torch.randint(30, (12, 6))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    case = Case(transformers.GPT2LMHeadModel(config), model_loss, batch)
    assert_same_rows(collect(case, method="vmap"), expected_rows(case))


def test_packed_sequences_fall_back_with_one_warning():
    case = CASES["packed"](20)
    with pytest.warns(UserWarning, match="taken one by one, because vmap cannot map this model: .*") as caught:
        rows = collect(case, chunk_size=4)
    assert len(caught) == 1
    torch.testing.assert_close(rows, expected_rows(case), rtol=0, atol=0)


def test_method_vmap_says_what_cannot_be_mapped():
    with pytest.raises(ValueError, match=r'method="vmap" cannot map this model: .*; use method="auto"'):
        collect(CASES["packed"](), method="vmap")


def test_layers_whose_outputs_are_changed_in_place():
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)
            self.convolve = nn.Conv1d(4, 3, 3, padding=1)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embed(tokens)
            hidden *= 2
            return self.convolve(self.mix(hidden).tanh_().transpose(1, 2)).sigmoid_().mean(2)

    torch.manual_seed(0)
    case = Case(Changing(), cross_entropy, (torch.randint(9, (6, 5)), torch.randint(3, (6,))))
    assert_same_rows(collect(case, method="vmap"), expected_rows(case))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("what", ["matrix", "vector", "module", "whole model"])
def test_backward_hooks_fall_back(what):
    case = mlp()
    if what == "matrix":
        case.model[0].weight.register_hook(lambda grad: grad * 2)
    elif what == "vector":
        case.model[2].bias.register_hook(lambda grad: grad * 2)
    elif what == "module":
        case.model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    else:
        case.model.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    name = {"matrix": "0.weight", "vector": "2.bias", "module": "the module 1", "whole model": "the model"}[what]
    with pytest.warns(UserWarning, match=f"cannot map this model: {name} has a backward hook"):
        rows = collect(case)
    assert_same_rows(rows, expected_rows(case))


class Holding(nn.Module):
    """Uses its parameters through a list, where no copies of them can be put."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))
        self.held = [self.weight, self.bias]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.held[0] + self.held[1])


def used_by_a_closure() -> Case:
    case = mlp()
    scale = nn.Parameter(torch.ones(3))
    case.model.register_parameter("scale", scale)
    return case._replace(loss_fn=lambda m, b: nn.functional.cross_entropy(m(b[0]) * scale, b[1]))


@pytest.mark.parametrize("build", [lambda: mlp()._replace(model=Holding()), used_by_a_closure])
def test_parameters_that_are_used_by_another_reference_fall_back(build):
    case = build()
    with pytest.warns(UserWarning, match="(weight|scale) is used by another reference than the module's own"):
        rows = collect(case)
    assert_same_rows(rows, expected_rows(case))


def test_an_error_of_the_loss_itself_is_the_one_that_is_raised():
    def broken(model, batch):
        raise KeyError("no such thing in the batch")

    with pytest.raises(KeyError, match="no such thing"):
        collect(mlp()._replace(loss_fn=broken))


def test_tokens_that_repeat_are_added_in_their_order():
    """By two threads, whose samples meet in the middle of one: an addition that does not keep the order shows here."""
    torch.manual_seed(0)
    tokens, gradients = torch.randint(3, (7, 64)), torch.randn(7, 64, 128)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = [rows_of_tokens(tokens, gradients) for _ in range(100)]
    finally:
        torch.set_num_threads(threads)
    expected = torch.zeros(7, 3, 128)
    for sample in range(7):
        for token, gradient in zip(tokens[sample], gradients[sample], strict=True):
            expected[sample, token] += gradient
    assert all(torch.equal(rows, expected.flatten(1)) for rows in results)


def rows_of_tokens(tokens: Tensor, gradients: Tensor) -> Tensor:
    rows = torch.zeros(7, 3 * 128)
    RowWriter(rows, {0: slice(0, 3 * 128)}).add_embedding(0, tokens, gradients, None)
    return rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_in_another_dtype(dtype):
    case = mlp()
    rows = collect(case, dtype=dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows, collect(case).to(dtype))


def test_autocast():
    case = CASES["embedding"]()
    with torch.autocast("cpu", torch.bfloat16):
        rows = collect(case, method="vmap")
        torch.testing.assert_close(rows, expected_rows(case), rtol=0.1, atol=0.02)


class Tied(nn.Module):
    """Reads tokens and scores classes with the same matrix, so that its rows are copied for each sample."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens).mean(1) @ self.tokens.weight[:3].t()


@pytest.mark.parametrize(
    "options",
    [{"padding_idx": 3}, {"padding_idx": -2}, {"scale_grad_by_freq": True},
     {"padding_idx": 8, "scale_grad_by_freq": True}],
)  # fmt: skip
def test_the_padding_entry_of_every_sample_has_no_gradient(options):
    torch.manual_seed(0)
    tokens = torch.randint(10, (6, 5))
    tokens[:, :2] = torch.tensor([3, 8])
    for model in (Tied(**options), nn.Sequential(nn.Embedding(10, 4, **options), nn.Flatten(), nn.Linear(20, 3))):
        case = Case(model, cross_entropy, (tokens, torch.randint(3, (6,))))
        assert_same_rows(collect(case, method="vmap"), expected_rows(case))


def test_a_loss_with_a_generator_of_its_own_falls_back():
    """Each sample is multiplied by the same draw; mapped, each would have had its own."""

    def loss(model: nn.Module, batch) -> Tensor:
        factors = torch.rand(5, generator=torch.Generator().manual_seed(1))
        return nn.functional.cross_entropy(model(batch[0] * factors), batch[1])

    case = mlp()._replace(loss_fn=loss)
    with pytest.warns(UserWarning, match="rand draws from a generator of its own"):
        rows = collect(case)
    assert_same_rows(rows, expected_rows(case))


def test_chunks_of_one_and_no_warning_at_all():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case = CASES["packed"]()
        assert collect(case, chunk_size=1).shape[0] == 5


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 5), torch.zeros(3)), r"batch 0 has leading dimensions \[3, 4\]"),
        ({"text": "hello"}, "batch 0 has no tensor in a dict"),
        ((torch.zeros(2, 5), ["a", "b"]), "batch 0 holds a list of 2 other things"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    with pytest.raises(ValueError, match=message):
        collect_gradients(mlp().model, cross_entropy, [batch], 2, per_sample=True)


def doubling(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("what", ["tensor hook", "hook of all modules", "backward in the loss"])
def test_other_models_that_cannot_be_mapped(what):
    case = mlp()
    handle = None
    if what == "tensor hook":
        case = case._replace(loss_fn=lambda m, b: nn.functional.cross_entropy(doubling(m(b[0])), b[1]))
    elif what == "backward in the loss":

        def loss_fn(model, batch):
            inputs = batch[0].clone().requires_grad_()
            torch.autograd.backward(cross_entropy(model, (inputs, batch[1])), inputs=[inputs])
            return cross_entropy(model, (batch[0] + inputs.grad, batch[1]))

        case = case._replace(loss_fn=loss_fn)
    else:
        handle = nn.modules.module.register_module_full_backward_hook(lambda module, dx, dy: None)
    try:
        with pytest.warns(UserWarning, match="taken one by one"):
            rows = collect(case)
        assert_same_rows(rows, expected_rows(case))
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("compile", [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(1, 5))])
def test_scripted_and_traced_modules(compile):
    case = mlp()
    case = case._replace(model=compile(case.model))
    with pytest.warns(UserWarning, match="it has a scripted module"):
        rows = collect(case)
    assert_same_rows(rows, expected_rows(case))

"""Small seeded models of every kind, each with a loss and a batch."""

import itertools
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.models.resnet import ResNet


class Case(NamedTuple):
    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    batch: Any
    is_mapped: bool = True

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """The batch in parts: inputs and targets of so many samples each."""
        return list(zip(*(part.split(size) for part in self.batch), strict=True))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * torch.rand(())


def failing_loss(call: int | None, error: Any, loss_fn: Callable[[Any, Any], Tensor] = cross_entropy) -> Any:
    """A loss that raises the error at its n-th call, or is not a number there if the error is None."""
    calls = itertools.count(1)

    @wraps(loss_fn)
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) != call:
            return loss_fn(model, batch)
        if error is None:
            return loss_fn(model, batch) * torch.nan
        raise error

    return loss


def backward_rows(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batches: Iterable[Any]) -> Tensor:
    """The rows of G in the obvious way: in eval mode, one `backward()` per batch."""
    model.eval()
    rows = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    model.zero_grad(set_to_none=True)
    return torch.stack(rows)


def mlp(n: int = 6) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return Case(model, cross_entropy, (torch.randn(n, 5), torch.randint(3, (n,))))


def cnn(n: int = 6) -> Case:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3, groups=2, padding="same"),
        nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding_mode="reflect", padding=1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    model[1].running_mean.normal_()
    return Case(model, cross_entropy, (torch.randn(n, 3, 8, 8), torch.randint(3, (n,))))


def signal(n: int = 5) -> Case:
    """Convolutions of other dimensions than two, one of them transposed."""
    torch.manual_seed(2)
    layers = nn.Conv1d(2, 3, 3), nn.ConvTranspose1d(3, 2, 2), nn.Unflatten(2, (1, 1, -1)), nn.Conv3d(2, 2, 1)
    model = nn.Sequential(*layers)
    return Case(model, lambda m, b: (m(b) ** 2).mean(), torch.randn(n, 2, 9))


def resnet(n: int = 5) -> Case:
    torch.manual_seed(3)
    return Case(ResNet(20, width=4), cross_entropy, (torch.randn(n, 3, 16, 16), torch.randint(10, (n,))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.position = nn.Parameter(torch.randn(4, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens) + self.position, src_key_padding_mask=tokens == 0)
        return self.head(hidden[:, 0])


def transformer(n: int = 6) -> Case:
    torch.manual_seed(4)
    tokens = torch.randint(1, 11, (n, 4))
    tokens[::2, 3] = 0
    return Case(Transformer(), cross_entropy, (tokens, torch.randint(3, (n,))))


class TiedLanguageModel(nn.Module):
    """The embedding's weight is the head's too; the same layer is used twice; positions are the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.position = nn.Embedding(5, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.mix(torch.tanh(self.mix(hidden))))


def tied(n: int = 6) -> Case:
    torch.manual_seed(5)
    tokens = torch.randint(9, (n, 5))
    return Case(TiedLanguageModel(), lambda m, b: F.cross_entropy(m(b)[0, :-1], b[0, 1:]), tokens)


def embedding(n: int = 6) -> Case:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=-1), nn.Flatten(), nn.Linear(12, 3))
    return Case(model, cross_entropy, [torch.randint(10, (n, 3)), torch.randint(3, (n,))])


class Packed(nn.Module):
    """A recurrent layer over sequences of any length, packed: lengths are numbers of Python, so it cannot be mapped."""

    def __init__(self, vocabulary: int, width: int, hidden: int, classes: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rnn = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][0])


def packed(n: int = 5) -> Case:
    torch.manual_seed(8)
    tokens = torch.randint(1, 11, (n, 6))
    tokens[::2, 4:] = 0
    return Case(Packed(11, 4, 5, 3), cross_entropy, (tokens, torch.randint(3, (n,))), is_mapped=False)


def frozen_backbone(n: int = 6) -> Case:
    case = cnn(n)
    for parameter in case.model[:-1].parameters():
        parameter.requires_grad_(False)
    return case


def unused_parameter(n: int = 6) -> Case:
    case = mlp(n)
    case.model.register_parameter("unused", nn.Parameter(torch.randn(2, 3)))
    case.model[0].extra = nn.Linear(2, 2)
    return case


def mixed_use(n: int = 6) -> Case:
    """A weight that is used by its layer, and in the loss besides; a layer with a frozen bias; one with bias only."""
    case = mlp(n)
    case.model[0].bias.requires_grad_(False)
    case.model[2].weight.requires_grad_(False)
    return case._replace(loss_fn=lambda m, b: cross_entropy(m, b) + (m[0].weight ** 2 * b[0][0]).sum())


def branching_sequences(n: int = 6) -> Case:
    """A loss that goes another way for some samples, of sequences, and a model that is used twice."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        value = sum(F.cross_entropy(model(part).mean(1), targets) for part in (inputs, 2 * inputs))
        return 2 * value if (inputs[:, 0, 0] > 0).all() else value

    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(70, 120), nn.Tanh(), nn.Linear(120, 3))
    return Case(model, loss, (torch.randn(n, 4, 70), torch.randint(3, (n,))))


def bert(n: int = 6, padded: bool = True, tokens: int = 7, **config: Any) -> Case:
    """A Hugging Face BERT from a config; needs transformers."""
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

    torch.manual_seed(8)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2} | config
    model = BertForSequenceClassification(BertConfig(**({"intermediate_size": 32} | sizes)))
    mask = torch.ones(n, tokens, dtype=torch.long)
    if padded:
        mask[1::2, -2:] = 0
    ids = torch.randint(sizes["vocab_size"], (n, tokens))
    batch = BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (n,))})
    return Case(model, lambda m, b: m(**b).loss, batch)


def normalised(n: int = 6) -> Case:
    """Weights that are computed from parameters, and every kind of normalisation."""
    torch.manual_seed(9)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    model = nn.Sequential(first, nn.GroupNorm(2, 4), nn.PReLU(), nn.LayerNorm(4), nn.Linear(4, 3))
    return Case(model.double(), cross_entropy, (torch.randn(n, 5).double(), torch.randint(3, (n,))))


CASES: dict[str, Callable[..., Case]] = {
    build.__name__: build
    for build in (
        mlp, cnn, signal, resnet, transformer, tied, embedding, packed, frozen_backbone, unused_parameter,
        mixed_use, branching_sequences, normalised,
    )
}  # fmt: skip

"""Small networks with one kind of layer each, and the gradients of their samples, one at a time."""

import torch
from torch import nn

import mfac

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


class Tokens(nn.Sequential):
    """A linear layer over tokens, whose outputs are averaged."""

    def forward(self, x):
        return self[1](torch.tanh(self[0](x)).mean(1))


def images(*layers):
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(-3), nn.Linear(32, 3))


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)),
    "convolution": lambda: images(nn.Conv2d(2, 8, 3, stride=2, padding=1)),
    "grouped": lambda: images(nn.Conv2d(2, 8, 3, groups=2, padding="same", dilation=2)),
    "circular": lambda: images(nn.Conv2d(2, 8, (2, 3), padding=1, padding_mode="circular")),
    "sequence": lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(28, 3)),
    "shared": lambda: nn.Sequential(*[layer := nn.Linear(6, 6), nn.Tanh(), layer], nn.Linear(6, 3)),
}
SHAPES = {"linear": (6,), "shared": (6,), "sequence": (3, 7), "tokens": (4, 5)}


def problem(name, count=24):
    torch.manual_seed(0)
    model = (Tokens(nn.Linear(5, 8), nn.Linear(8, 3)) if name == "tokens" else MODELS[name]()).double()
    shape = SHAPES.get(name, (2, 6, 6))
    sizes = [8] * (count // 8) + [count % 8] * (count % 8 > 0)
    return model, [(torch.randn(size, *shape).double(), torch.randint(3, (size,))) for size in sizes]


def dense_rows(model, batches, name):
    """The gradient of each sample's loss, [samples, outputs, inputs]."""
    weight = dict(model.named_parameters())[name]
    samples = [(x[None], y[None]) for batch in batches for x, y in zip(*batch, strict=True)]
    return torch.stack([torch.autograd.grad(LOSS(model, sample), weight)[0] for sample in samples]).flatten(2)

"""Residual networks without batch norm (Brock et al., 2021): convolutions of standardised weights, scaled branches.

The paper prunes timm's NF-ResNet50. Each convolution has a gain and a bias per channel, like a batch norm.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))  # what ReLU takes from the deviation of a Gaussian


class ScaledConv2d(nn.Conv2d):
    """A convolution whose weights are standardised over the inputs of each output channel, times a learned gain."""

    def __init__(self, channels_in: int, channels_out: int, size: int, stride: int = 1, padding: int = 0):
        super().__init__(channels_in, channels_out, size, stride, padding)
        self.gain = Parameter(self.weight.new_ones(channels_out, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.flatten(1)
        variance, mean = rows.var(1, correction=0), rows.mean(1)
        scale = self.gain.flatten() * (variance * rows.shape[1] + 1e-6).rsqrt()
        weight = (self.weight - mean.view(-1, 1, 1, 1)) * scale.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class FreeBlock(nn.Module):
    """x + α f(x/β): β is the expected standard deviation of the input, α scales the branch.

    `widths` are of the input and of every convolution in the branch; the first kernel wider than one has the stride.
    """

    def __init__(self, widths: list[int], sizes: list[int], stride: int, alpha: float, beta: float):
        super().__init__()
        strided = next(i for i, size in enumerate(sizes) if size > 1)
        self.convolutions = nn.ModuleList(
            ScaledConv2d(widths[i], widths[i + 1], size, stride if i == strided else 1, size // 2)
            for i, size in enumerate(sizes)
        )
        self.alpha, self.beta, self.stride = alpha, beta, stride
        self.shortcut = ScaledConv2d(widths[0], widths[-1], 1) if stride > 1 or widths[0] != widths[-1] else None

    def forward(self, x: Tensor) -> Tensor:
        y = _relu(x) / self.beta
        if self.shortcut is not None:
            x = self.shortcut(F.avg_pool2d(y, self.stride, ceil_mode=True) if self.stride > 1 else y)
        for i, convolution in enumerate(self.convolutions):
            y = convolution(y if i == 0 else _relu(y))
        return x + self.alpha * y


class NormalizerFreeResNet(nn.Module):
    """Stages of blocks after a stem; see `nf_resnet50` and `nf_resnet`."""

    def __init__(self, stem: nn.Module, channels: int, stages: list[tuple[list[int], int, int]], sizes: list[int],
                 num_classes: int, alpha: float = 0.2):  # fmt: skip
        super().__init__()
        self.stem = stem
        blocks, variance = [], 1.0
        for branch, count, stride in stages:
            for i in range(count):
                step = stride if i == 0 else 1
                blocks.append(FreeBlock([channels, *branch], sizes, step, alpha, math.sqrt(variance)))
                # A shortcut through a convolution starts again from a deviation of one.
                variance = (1.0 if blocks[-1].shortcut is not None else variance) + alpha**2
                channels = branch[-1]
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_relu(self.blocks(self.stem(x))).mean((2, 3)))


def nf_resnet50(num_classes: int = 1000) -> NormalizerFreeResNet:
    stem = nn.Sequential(ScaledConv2d(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1))
    stages = [([p, p, 4 * p], count, 1 if p == 64 else 2) for p, count in ((64, 3), (128, 4), (256, 6), (512, 3))]
    return NormalizerFreeResNet(stem, 64, stages, [1, 3, 1], num_classes)


def nf_resnet(depth: int = 20, num_classes: int = 10) -> NormalizerFreeResNet:
    """A normalizer-free ResNet for 32 x 32 images, 6n + 2 layers."""
    blocks, rest = divmod(depth - 2, 6)
    if rest:
        raise ValueError(f"the depth must be 6 n + 2 (20, 32, 44, ...), not {depth}")
    stages = [([width, width], blocks, 1 if width == 16 else 2) for width in (16, 32, 64)]
    return NormalizerFreeResNet(ScaledConv2d(3, 16, 3, 1, 1), 16, stages, [3, 3], num_classes)


def _relu(x: Tensor) -> Tensor:
    return F.relu(x) * RELU_GAIN

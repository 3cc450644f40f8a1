"""Residual networks without batch norm (Brock et al., 2021): convolutions of standardised weights, scaled branches.

The paper prunes timm's NF-ResNet50. Each convolution has a gain and a bias per channel, like a batch norm.
"""

import math

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))  # what ReLU takes from the deviation of a Gaussian
ALPHA = 0.2


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
    """x + α f(x/β): β is the expected standard deviation of the input, α scales the branch of two convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, beta: float):
        super().__init__()
        self.conv1 = ScaledConv2d(channels_in, channels_out, 3, stride, 1)
        self.conv2 = ScaledConv2d(channels_out, channels_out, 3, 1, 1)
        self.beta, self.stride = beta, stride
        self.shortcut = ScaledConv2d(channels_in, channels_out, 1) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = _relu(x) / self.beta
        if self.shortcut is not None:
            x = self.shortcut(F.avg_pool2d(y, self.stride, ceil_mode=True))
        return x + ALPHA * self.conv2(_relu(self.conv1(y)))


class NormalizerFreeResNet(nn.Module):
    """For 32 x 32 images, 6n + 2 layers, as `experiments.models.resnet.ResNet`."""

    def __init__(self, depth: int = 20, num_classes: int = 10):
        super().__init__()
        count = (depth - 2) // 6
        self.stem = ScaledConv2d(3, 16, 3, 1, 1)
        blocks, variance, channels = [], 1.0, 16
        for width in (16, 32, 64):
            for _ in range(count):
                blocks.append(FreeBlock(channels, width, width // channels, math.sqrt(variance)))
                # A shortcut through a convolution starts again from a deviation of one.
                variance = (1.0 if blocks[-1].shortcut is not None else variance) + ALPHA**2
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(_relu(self.blocks(self.stem(x))).mean((2, 3)))


def _relu(x: Tensor) -> Tensor:
    return F.relu(x) * RELU_GAIN

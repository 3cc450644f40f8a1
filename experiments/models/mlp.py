"""Fully connected networks for MNIST."""

import itertools

from torch import nn

LENET = (300, 100)  # LeNet-300-100 (LeCun et al., 1998)
MLPNET = (40, 20)  # the network of the WoodFisher paper's comparison with K-FAC


def mlp(hidden: tuple[int, ...]) -> nn.Sequential:
    """Linear layers of these widths with ReLU in between; images are flattened."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise([784, *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 10))

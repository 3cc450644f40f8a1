"""The networks of the recipes: published numbers of weights, and outputs of the right shape."""

import pytest
import torch
from torch import nn

from experiments.models.mlp import LENET, mlp
from experiments.models.mobilenet import MobileNetV1
from experiments.models.normalizer_free import NormalizerFreeResNet, ScaledConv2d
from experiments.models.resnet import ResNet
from experiments.models.resnet50 import ResNet50
from experiments.models.wide_resnet import WideResNet
from experiments.recipes.table2 import WEIGHTS


def count(make, dims=0):
    with torch.device("meta"):
        model = make()
    return sum(p.numel() for p in model.parameters() if p.ndim >= dims)


def millions(published):
    """As Zagoruyko and Komodakis (2016) give them in tables 3 to 5."""
    return pytest.approx(1e6 * published, abs=51_000)


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (MobileNetV1, 4_231_976),  # Keras's MobileNet: 4,253,864 with the 21,888 statistics of batch norm
        (ResNet50, 25_557_032),  # torchvision's resnet50
        (NormalizerFreeResNet, 272_474),  # as the ResNet20 with projections that it replaces
        (lambda: mlp(LENET), 266_610),  # LeNet-300-100
        (lambda: ResNet(20, projection=False), 269_722),
        (lambda: ResNet(20, projection=True), 272_474),
        (lambda: ResNet(32, projection=False), 464_154),
        (lambda: WideResNet(40, 2), millions(2.2)),
        (lambda: WideResNet(22, 8), millions(17.2)),
        (lambda: WideResNet(28, 10), millions(36.5)),
    ],
)
def test_networks_have_the_published_number_of_weights(make, weights):
    assert count(make) == weights


def test_table_2_prunes_all_weights_of_two_and_more_dimensions():
    assert {make.__name__: count(make, dims=2) for make in (MobileNetV1, ResNet50)} == WEIGHTS


def test_scaled_convolutions_have_standardised_weights():
    layer = ScaledConv2d(3, 5, 3, padding=1).double()
    layer.gain.data.fill_(2.0)
    x = torch.randn(2, 3, 6, 6).double()
    weight = torch.stack([(w - w.mean()) / (w - w.mean()).norm() * 2 for w in layer.weight.detach()])
    assert torch.allclose(layer(x), nn.functional.conv2d(x, weight, layer.bias, padding=1), rtol=1e-4)

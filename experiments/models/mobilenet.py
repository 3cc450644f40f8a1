"""MobileNetV1 (Howard et al., 2017) with its first two strides left out, for 32 x 32 images."""

from torch import Tensor, nn

# (output channels, stride) of the 13 depthwise separable layers.
LAYERS = ((64, 1), (128, 1), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


class MobileNetV1(nn.Module):
    """`width` multiplies all channels."""

    def __init__(self, num_classes: int = 1000, width: float = 1.0):
        super().__init__()
        channels = int(32 * width)
        layers = [_convolution(3, channels, 1)]
        for wide, stride in LAYERS:
            layers.append(_separable(channels, int(wide * width), stride))
            channels = int(wide * width)
        self.model = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.model(x).mean((2, 3)))


def _convolution(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True))


def _separable(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_in, 3, stride, 1, groups=channels_in, bias=False),
        nn.BatchNorm2d(channels_in),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )

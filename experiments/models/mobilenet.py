"""MobileNetV1 (Howard et al., 2017), for ImageNet, and with its first strides left out for 32 x 32 images.

The names of the weights are those of the STR checkpoints that the paper starts from: `model.0.0.weight`, ..., `fc`.
"""

from torch import Tensor, nn

# (output channels, stride) of the 13 depthwise separable layers.
LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


class MobileNetV1(nn.Module):
    """`small_images` leaves the first two strides out: 32 x 32 pixels become 4 x 4; `width` multiplies all channels."""

    def __init__(self, num_classes: int = 1000, small_images: bool = False, width: float = 1.0):
        super().__init__()
        channels = int(32 * width)
        layers = [_convolution(3, channels, 1 if small_images else 2)]
        for number, (wide, stride) in enumerate(LAYERS):
            out = int(wide * width)
            layers.append(_separable(channels, out, 1 if small_images and number == 1 else stride))
            channels = out
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

"""Wide residual networks for 32 x 32 images (Zagoruyko and Komodakis, 2016)."""

from torch import Tensor, nn
from torch.nn import functional as F


class WideBlock(nn.Module):
    """Batch norm and ReLU before each of two 3 x 3 convolutions; the shortcut branches off behind the first of them."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.shortcut = None
        if channels_in != channels_out:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(F.relu(self.bn2(self.conv1(active)))) + shortcut


class WideResNet(nn.Module):
    """WRN-depth-width: 6n + 4 layers in three stages of n blocks, 16, 32 and 64 times `width` channels wide."""

    def __init__(self, depth: int, width: int, num_classes: int = 10):
        super().__init__()
        blocks = (depth - 4) // 6
        widths = [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.stages = nn.Sequential(*(_stage(widths[i], widths[i + 1], blocks, 1 if i == 0 else 2) for i in range(3)))
        self.bn = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.stages(self.conv1(x)))).mean((2, 3)))


def _stage(channels_in: int, channels_out: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (WideBlock(channels_out, channels_out, 1) for _ in range(blocks - 1))
    return nn.Sequential(WideBlock(channels_in, channels_out, stride), *rest)

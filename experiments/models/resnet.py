"""ResNets for 32 x 32 images (He et al., 2016)."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets.folder import find


class PaddedShortcut(nn.Module):
    """Every second pixel, with zero channels added at both ends: a shortcut without parameters."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.added = (channels_out - channels_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added, self.added))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, projection: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 and projection:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))
        elif stride != 1:
            self.downsample = PaddedShortcut(channels_in, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """6n + 2 layers in three stages of n blocks, 16, 32 and 64 channels wide (`width` is that of the first).

    Shortcuts between stages are 1 x 1 convolutions with `projection`, or else padded.
    """

    def __init__(self, depth: int = 20, num_classes: int = 10, projection: bool = True, width: int = 16):
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, 1, projection)
        self.layer2 = _stage(width, 2 * width, blocks, 2, projection)
        self.layer3 = _stage(2 * width, 4 * width, blocks, 2, projection)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


def _stage(channels_in: int, channels_out: int, blocks: int, stride: int, projection: bool) -> nn.Sequential:
    first = BasicBlock(channels_in, channels_out, stride, projection)
    return nn.Sequential(first, *(BasicBlock(channels_out, channels_out, 1, projection) for _ in range(blocks - 1)))


def plain_resnet(depth: int) -> ResNet:
    """The paper's for training: shortcuts without parameters."""
    return ResNet(depth, projection=False).to(memory_format=torch.channels_last)


def mfac_resnet20() -> ResNet:
    """The M-FAC authors' ResNet20 on CIFAR-10, 272,474 weights; inputs normalised by `HALVES`: 91.43 %."""
    return _loaded(ResNet(20), find("resnet20", "checkpoints", "mfac_resnet20_cifar10.pth.tar"))


def akamaster_resnet20() -> ResNet:
    """Another public ResNet20 on CIFAR-10, parameter-free shortcuts; inputs normalised by `IMAGENET`: 91.73 %."""
    return _loaded(ResNet(20, projection=False), find(None, "checkpoints", "akamaster_resnet20-12fca82f.th"))


def _loaded(model: ResNet, path: Path) -> ResNet:
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({k.removeprefix("module.").replace("linear.", "fc."): v for k, v in state.items()})
    return model.to(memory_format=torch.channels_last).eval()

"""ResNet50 for ImageNet (He et al., 2016), the stride in the 3 x 3 convolutions; weights are named as torchvision's."""

from torch import Tensor, nn
from torch.nn import functional as F

EXPANSION = 4


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, planes: int, stride: int):
        super().__init__()
        channels_out = EXPANSION * planes
        self.conv1 = nn.Conv2d(channels_in, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    def __init__(self, num_classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(64, 64, 3, 1)
        self.layer2 = _stage(256, 128, 4, 2)
        self.layer3 = _stage(512, 256, 6, 2)
        self.layer4 = _stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _stage(channels_in: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(EXPANSION * planes, planes, 1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(channels_in, planes, stride), *rest)

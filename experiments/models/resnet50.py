"""ResNet50 for ImageNet (He et al., 2016), the stride in the 3 x 3 convolutions; weights are named as torchvision's."""

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets.folder import find

EXPANSION = 4
IMAGENETTE = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)  # its classes among those of ImageNet
MEANS = (123.68, 116.779, 103.939)


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


def imagenet_resnet50() -> ResNet50:
    """Trained on ImageNet; strides in the first convolution of a block, inputs 0 to 255 minus `MEANS`."""
    model = ResNet50()
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, (1, 1)
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    arrays = np.load(find(None, "resnet50-imagenet", "resnet50_imagenet.fp16.npz"))
    state = {key: torch.from_numpy(arrays[key]).float() for key in arrays.files}
    model.load_state_dict(model.state_dict() | state)
    return model.to(memory_format=torch.channels_last).eval()


@cache
def imagenette(split: str) -> tuple[Tensor, Tensor]:
    """Pictures of ten classes of ImageNet, normalised for `imagenet_resnet50`, shuffled, and their class numbers."""
    from PIL import Image

    folders = sorted(find(None, "imagenette", split).iterdir())  # one for each class
    files = [(path, number) for number, folder in enumerate(folders) for path in sorted(folder.iterdir())]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    arrays = [np.array(Image.open(files[i][0]).convert("RGB"), np.float32) for i in order]  # 224 x 224 as they are
    images = (torch.from_numpy(np.stack(arrays)) - torch.tensor(MEANS)).permute(0, 3, 1, 2)
    return images, torch.tensor(IMAGENETTE)[torch.tensor([files[i][1] for i in order])]


@torch.no_grad()
def top_accuracies(model: nn.Module) -> dict[str, float]:
    """Top-1 and top-5 accuracy among 1,000 classes on the 700 validation pictures, and how many of them are taken for
    one of the ten classes that there are; in per cent."""
    images, labels = imagenette("val")
    best = torch.cat([model(part).topk(5, 1).indices for part in images.split(50)])
    right, within = best == labels[:, None], torch.isin(best[:, 0], torch.tensor(IMAGENETTE))
    found = {"top1": right[:, 0], "top5": right.any(1), "in_ten": within}
    return {name: 100 * float(hits.double().mean()) for name, hits in found.items()}

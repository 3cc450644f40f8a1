"""The public checkpoints of two ResNets for 32 x 32 images; the networks themselves are in `mfac.app.tasks.resnet`."""

from experiments.data import find
from mfac.app.tasks.resnet import BasicBlock, PaddedShortcut, ResNet, load_checkpoint

__all__ = ["BasicBlock", "PaddedShortcut", "ResNet", "akamaster_resnet20", "mfac_resnet20"]


def mfac_resnet20() -> ResNet:
    """The M-FAC authors' ResNet20 on CIFAR-10, 272,474 weights; inputs normalised by `data.HALVES`: 91.43 %."""
    return load_checkpoint(ResNet(20, projection=True), find("checkpoints", "mfac_resnet20_cifar10.pth.tar"))


def akamaster_resnet20() -> ResNet:
    """Idelbayev's ResNet20 on CIFAR-10, 269,722 weights; inputs normalised by `data.IMAGENET`: 91.73 %."""
    return load_checkpoint(ResNet(20, projection=False), find("checkpoints", "akamaster_resnet20-12fca82f.th"))

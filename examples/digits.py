"""What the small examples share: scikit-learn's digits, a network of 9,610 weights, and an order of the samples."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, TensorDataset

from mfac import MFAC, FullMatrixAdam


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """(1,440 images to train on, 357 to test on), each a vector of 64 numbers between 0 and 1, with their labels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


class EpochOrder(Sampler[int]):
    """A shuffled order that depends on the epoch alone, so that a resumed run sees what it would have seen."""

    def __init__(self, data: Dataset[tuple[Tensor, ...]]):
        self.size, self.epoch = len(data), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def build_optimizer(name: str, params, num_grads: int, process_group=None) -> torch.optim.Optimizer:
    """FullMatrixAdam with its defaults, or MFAC with the settings that train_plain.py explains."""
    if name == "full_matrix_adam":
        return FullMatrixAdam(params, num_grads=num_grads, process_group=process_group)
    options = {"lr": 1.0, "damping": 0.1, "normalize": "sum", "momentum": 0.9}
    return MFAC(params, num_grads=num_grads, process_group=process_group, **options)

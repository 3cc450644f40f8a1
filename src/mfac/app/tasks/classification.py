"""What the built-in tasks of images share: accuracy, and the short training of a fresh network."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients import criterion_loss

cross_entropy = criterion_loss(F.cross_entropy)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The fraction of samples whose class the model gets right, in eval mode; the mode is as before afterwards."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    right = total = 0
    for inputs, labels in batches:
        right += int((model(inputs.to(device)).argmax(1) == labels.to(device)).sum())
        total += len(labels)
    model.train(training)
    return right / total


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], epochs: int, lr: float) -> None:
    """Adam with a learning rate that falls to zero, in place; the mode is as before afterwards."""
    device = next(model.parameters()).device
    training = model.training
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for inputs, labels in batches:
            optimizer.zero_grad()
            cross_entropy(model, (inputs.to(device), labels.to(device))).backward()
            optimizer.step()
        schedule.step()
    model.train(training)

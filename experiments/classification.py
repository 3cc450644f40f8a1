"""Accuracy and a short training for classifiers of tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients import criterion_loss

cross_entropy = criterion_loss(F.cross_entropy)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The fraction of samples classified correctly, in eval mode; the mode is restored."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    hits = [model(inputs.to(device)).argmax(1) == labels.to(device) for inputs, labels in batches]
    model.train(training)
    return float(torch.cat(hits).double().mean())


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], epochs: int, lr: float) -> None:
    """Trains in place by Adam with a cosine learning rate; the mode is restored."""
    device, training = next(model.parameters()).device, model.training
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

"""A task for mfac: a model, its data and its loss. It works as it is: try it, then put in your own.

    mfac plan digits                       memory and gradients needed for pruning
    mfac prune digits --sparsity 0.9       prune the model
    mfac train digits                      train it with two optimizers side by side

This example classifies scikit-learn's handwritten digits of 8 x 8 pixels; every fifth of the 1,797 is held out.
"""

from collections.abc import Iterable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mfac.gradients import criterion_loss

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
held_out = torch.arange(len(images)) % 5 == 0


def model() -> nn.Module:
    """The model, trained or not; `mfac prune --checkpoint FILE` loads weights into it. torch is seeded beforehand."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


class ShuffledBatches:
    """The training digits in batches of 32, in a new order in every pass. A DataLoader does this as well."""

    def __len__(self) -> int:
        return int((~held_out).sum()) // 32

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = images[~held_out], labels[~held_out]
        for chosen in torch.randperm(len(inputs)).split(32)[: len(self)]:
            yield inputs[chosen], targets[chosen]


def train_batches() -> ShuffledBatches:
    """An iterable of batches, for example a DataLoader; one pass is an epoch. A batch is whatever `loss` takes."""
    return ShuffledBatches()


# (model, batch) -> the mean loss over the batch, a scalar tensor. Write a function, or use one of these:
#   mfac.criterion_loss(criterion)   for batches (inputs, targets)
#   mfac.model_loss                  for Hugging Face models, whose output has .loss
loss = criterion_loss(nn.CrossEntropyLoss())


# Everything below is optional.


def eval_batches() -> list[tuple[Tensor, Tensor]]:
    """Held-out batches, for the loss and the accuracy in tables and reports."""
    return [(images[held_out], labels[held_out])]


# The measure is the accuracy on these batches, unless you write evaluate(model) -> float; then name it with
# measure = "...", and say whether more is better with higher_is_better = True or False.


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Used between the steps of `mfac prune --gradual`, and by `mfac train --optimizer task`."""
    return torch.optim.Adam(parameters, lr=1e-3)


def pretrain(model: nn.Module) -> None:
    """Trains a new model, once, before it is pruned. Remove this function if `model()` returns a trained model."""
    device, epochs = next(model.parameters()).device, 15
    model.train()
    steps = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, epochs)
    for _ in range(epochs):
        for inputs, targets in train_batches():
            steps.zero_grad()
            loss(model, (inputs.to(device), targets.to(device))).backward()
            steps.step()
        schedule.step()

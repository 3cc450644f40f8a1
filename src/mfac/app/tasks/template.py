"""The file that `mfac init` writes: a complete task to edit."""

from pathlib import Path

TEMPLATE = '''"""A task for mfac: a model, its data and its loss. It works as it is: try it, then put in your own.

    mfac plan {file}                       memory and time needed for pruning
    mfac prune {file} --sparsity 0.9       prune the model
    mfac train {file}                      train it with two optimizers side by side

This example classifies points on the three arms of a spiral.
"""

import math

import torch
from torch import nn

import mfac


def model():
    """The model, trained or not; `mfac prune --checkpoint FILE` loads weights into it. torch is seeded beforehand."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def train_batches():
    """An iterable of batches, for example a DataLoader; one pass is an epoch. A batch is whatever `loss` takes."""
    points, labels = spiral(1024, seed=0)
    order = torch.randperm(len(points))  # a new order in every epoch
    return [(points[chosen], labels[chosen]) for chosen in order.split(32)]


# (model, batch) -> the mean loss over the batch, a scalar tensor. Write a function, or use one of these:
#   mfac.criterion_loss(criterion)   for batches (inputs, targets)
#   mfac.model_loss                  for Hugging Face models, whose output has .loss
loss = mfac.criterion_loss(nn.CrossEntropyLoss())


# Everything below is optional.


def eval_batches():
    """Held-out batches, for the loss in tables and reports."""
    return [spiral(512, seed=1)]


measure = "accuracy"  # the name of what `evaluate` returns
higher_is_better = True


@torch.no_grad()
def evaluate(model):
    """The quality of the model, as one number. It is also called during training, so restore the mode."""
    training = model.training
    model.eval()
    points, labels = (tensor.to(next(model.parameters()).device) for tensor in spiral(512, seed=1))
    right = (model(points).argmax(1) == labels).float().mean().item()
    model.train(training)
    return right


def optimizer(parameters):
    """Used between the steps of `mfac prune --gradual`, and by `mfac train --optimizer task`."""
    return torch.optim.Adam(parameters, lr=3e-3)


def pretrain(model):
    """Trains a new model, once, before it is pruned. Remove this function if `model()` returns a trained model."""
    device = next(model.parameters()).device
    model.train()
    steps = optimizer(model.parameters())
    for _ in range(40):
        for batch in train_batches():
            steps.zero_grad()
            loss(model, [tensor.to(device) for tensor in batch]).backward()
            steps.step()


def spiral(count, seed):
    """Points on the arms of a spiral, and the number of the arm."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + labels * (2 * math.pi / 3) + 0.15 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels
'''


def write_template(path: Path, force: bool = False) -> None:
    """Writes the template to a file that ends in .py; `force` overwrites an existing one."""
    if path.suffix != ".py":
        raise ValueError(f"a task is a Python file: {path} should end in .py, for example task.py")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}; create it first, or choose another place")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; choose another name, or overwrite it with --force")
    path.write_text(TEMPLATE.replace("{file}", str(path)), encoding="utf-8")

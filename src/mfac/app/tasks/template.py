"""The file that `mfac init` writes: a task that works as it stands, to be changed piece by piece."""

from pathlib import Path

TEMPLATE = '''"""A task for mfac: a model, its data and its loss. Try it as it is, then put your own in.

    mfac plan {file}                       how much memory and time pruning would take
    mfac prune {file} --sparsity 0.9       prune it, and compare methods
    mfac train {file}                      train it, and compare optimizers

The model here sorts points on three arms of a spiral.
"""

import math

import torch
from torch import nn

import mfac


def model():
    """The network, as you would make it for training or load it from a checkpoint (`mfac prune --checkpoint FILE`
    puts the weights of a file into it). mfac seeds torch before it calls this."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def train_batches():
    """An iterable of batches; one pass over it is one epoch. A DataLoader is fine. A batch is whatever `loss` takes."""
    points, labels = spiral(1024, seed=0)
    order = torch.randperm(len(points))  # another order in every epoch
    return [(points[chosen], labels[chosen]) for chosen in order.split(32)]


# (model, batch) -> the loss as a scalar tensor, the mean over the batch. Two are ready made:
#   mfac.criterion_loss(criterion)   for batches (inputs, targets)
#   mfac.model_loss                  for Hugging Face models, whose output has .loss
# or write a function: def loss(model, batch): ...
loss = mfac.criterion_loss(nn.CrossEntropyLoss())


# Everything below is optional.


def eval_batches():
    """Batches that were not trained on: the loss that is reported is taken on them."""
    return [spiral(512, seed=1)]


measure = "accuracy"  # what `evaluate` gives, for tables and plots
higher_is_better = True


@torch.no_grad()
def evaluate(model):
    """How good the model is, as one number. It may be called in the middle of training: leave the mode as it was."""
    training = model.training
    model.eval()
    points, labels = (tensor.to(next(model.parameters()).device) for tensor in spiral(512, seed=1))
    right = (model(points).argmax(1) == labels).float().mean().item()
    model.train(training)
    return right


def optimizer(parameters):
    """For training between the steps of `mfac prune --gradual`, and as "task" in `mfac train`."""
    return torch.optim.Adam(parameters, lr=3e-3)


def pretrain(model):
    """Trains a model that came fresh from `model()`: what is pruned should be trained. Take it out if `model()`
    returns a trained one."""
    device = next(model.parameters()).device
    model.train()
    steps = optimizer(model.parameters())
    for _ in range(40):
        for batch in train_batches():
            steps.zero_grad()
            loss(model, [tensor.to(device) for tensor in batch]).backward()
            steps.step()


def spiral(count, seed):
    """Points on three arms of a spiral, and the number of the arm."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + labels * (2 * math.pi / 3) + 0.15 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels
'''


def write_template(path: Path, force: bool = False) -> None:
    """Writes a task to start from.

    Args:
        path: a file that ends in .py, in a folder that is there.
        force: overwrite what is there.

    Raises:
        ValueError: the name does not end in .py.
        FileExistsError: the file is there, and `force` is not given.
        FileNotFoundError: the folder is not there.
    """
    if path.suffix != ".py":
        raise ValueError(f"a task is a Python file: {path} should end in .py, as task.py does")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}; make it first, or choose another place")
    if path.exists() and not force:
        raise FileExistsError(f"{path} is there already; choose another name, or overwrite it with --force")
    path.write_text(TEMPLATE.replace("{file}", str(path)), encoding="utf-8")

"""Gradual pruning in a loop of your own: handwritten digits to 95 % sparsity, then saved as a compact file.

Run: python examples/gradual_pruning.py
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mfac
from mfac.pruning import (
    GradualPruner,
    geometric_schedule,
    learning_rate_cycle,
    load_compact,
    save_compact,
    sparsity_report,
)

EPOCHS_BETWEEN = 2


def digits():
    """(training data, test data): 8 x 8 images of digits."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return TensorDataset(images[order[:1400]], labels[order[:1400]]), (images[order[1400:]], labels[order[1400:]])


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model, loader, optimizer, scheduler, epochs):
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()  # removed weights stay at zero, and so does their momentum
        scheduler.step()


@torch.no_grad()
def accuracy(model, images, labels):
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def main():
    torch.manual_seed(0)
    data, test = digits()
    model = network()
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, loader, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), 10)
    print(f"dense: {accuracy(model, *test):.1f} %")

    schedule = [0.5, *geometric_schedule(0.5, 0.95, 4)]
    scheduler = learning_rate_cycle(optimizer, EPOCHS_BETWEEN, len(schedule))
    pruner = GradualPruner(
        model,
        mfac.criterion_loss(nn.CrossEntropyLoss()),
        DataLoader(data, batch_size=16, shuffle=True),
        schedule,
        optimizer=optimizer,
        reset_momentum=True,
        recomputations=4,
    )
    while (result := pruner.step()) is not None:
        before = accuracy(model, *test)
        train(model, loader, optimizer, scheduler, EPOCHS_BETWEEN)
        print(
            f"{100 * result.sparsity:.1f} %: {before:.1f} % right after pruning, {accuracy(model, *test):.1f} % trained"
        )

    print(sparsity_report(model, pruner.masks))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        print(save_compact(model, path, pruner.masks))
        again = network()
        load_compact(path, again)
        print(f"read back: {accuracy(again, *test):.1f} %")


if __name__ == "__main__":
    main()

"""One-shot pruning of the same trained network by every method: the loss that is left, time and memory."""

import time

import torch
from torch import nn
from torch.nn import functional as F

import mfac
from experiments.baselines.pruning import prune
from peers.cells import forget_peak, peak, resident

METHODS = ("mfac", "magnitude", "wanda", "diagonal", "woodfisher")
SPARSITY, GRADIENTS, BLOCK = 0.8, 256, 128
loss_fn = mfac.criterion_loss(nn.CrossEntropyLoss())


def needs(cell):
    """Rows and blocks: the larger is WoodFisher's, some copies of dense blocks."""
    return int(4 * GRADIENTS * cell["d"] + 16 * BLOCK * cell["d"] + 64 * cell["d"])


def network(d):
    """64 - w - w - 10 with about d weights."""
    side = round(((74 / 2) ** 2 + d) ** 0.5 - 74 / 2)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, side), nn.ReLU(), nn.Linear(side, side), nn.ReLU(), nn.Linear(side, 10))


def digits():
    """Training and test images of handwritten digits, 8 x 8."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (images[order[:1400]], labels[order[:1400]]), (images[order[1400:]], labels[order[1400:]])


def trained(d, train, steps=150):
    model, (images, labels) = network(d), train
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (128,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def judged(model, data):
    images, labels = data
    outputs = model(images)
    return {
        "loss": float(F.cross_entropy(outputs, labels)),
        "accuracy": float((outputs.argmax(1) == labels).double().mean()),
    }


def measure(cell, report, folder):
    train, test = digits()
    model = trained(cell["d"], train)
    before = judged(model, test)
    batches = list(zip(train[0].split(128), train[1].split(128), strict=True))
    start = resident()
    forget_peak()
    report.ready()
    began = time.perf_counter()
    result = prune(
        model, loss_fn, batches, SPARSITY, num_grads=GRADIENTS, per_sample=True, block_size=BLOCK, damping=1e-4,
        recomputations=4, method=cell["method"], progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    dense = {f"dense_{name}": value for name, value in before.items()}
    return {
        "prune_s": seconds,
        "sparsity": result.sparsity,
        **judged(model, test),
        **dense,
        "peak_bytes": peak() - start,
    }

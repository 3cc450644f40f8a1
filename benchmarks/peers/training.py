"""A training step of the same network by every optimizer: time beside forward and backward, and memory."""

import time
import warnings
from functools import partial

import torch
import torch._dynamo  # the first step of any optimizer would import it, in every process
from pytorch_optimizer import SOAP, AdaHessian, Shampoo
from torch import nn

import mfac
from peers.cells import PATIENCE, forget_peak, peak, resident
from peers.steps import fill_window

LAYERS, BATCH = 3, 32
FEWEST_STEPS, MOST_STEPS = 11, 200
WINDOWS = (16, 64, 256, 1024)
CONTENDERS = {
    "SGD": partial(torch.optim.SGD, lr=1e-4),
    **{f"mfac, m = {m}": partial(mfac.MFAC, lr=1e-6, num_grads=m) for m in WINDOWS},
    "mfac, m = 1024, top-k 1 %": partial(mfac.MFAC, lr=1e-6, num_grads=1024, window=mfac.TopK(0.01)),
    "AdaHessian": partial(AdaHessian, lr=1e-4),
    "Shampoo": partial(Shampoo, lr=1e-4),
    "SOAP": partial(SOAP, lr=1e-4),
    "Muon": partial(torch.optim.Muon, lr=1e-4),
}


def width(d):
    return round((d / LAYERS) ** 0.5)


def needs(cell):
    """Three copies of the weights for anybody; a window; Shampoo and SOAP keep squares of the layers' sides."""
    d, window = cell["d"], cell["m"] or 0
    kept = 0.011 if "top-k" in cell["method"] else 1
    return int(12 * d + 4 * window * d * kept + 32 * window**2 + 64 * d)


def network(d):
    torch.manual_seed(0)
    side = width(d)
    layers = [nn.Linear(side, side, bias=False) for _ in range(LAYERS)]  # matrices only: Muon knows nothing else
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def measure(cell, report, folder):
    d = cell["d"]
    model, start = network(d), resident()
    optimizer = CONTENDERS[cell["method"]](model.parameters())
    if isinstance(optimizer, mfac.MFAC) and "top-k" not in cell["method"]:
        fill_window(optimizer._window.operator)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, BATCH, width(d), generator=generator) for _ in range(32)]
    forget_peak()
    report.ready()
    curved = isinstance(optimizer, AdaHessian)
    warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")  # gradients are dropped at every step

    def step(k):
        began = time.perf_counter()
        inputs, targets = batches[k % len(batches)]
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward(create_graph=curved)
        gradients = time.perf_counter() - began
        optimizer.step()
        return gradients, time.perf_counter() - began

    weights = sum(p.numel() for p in model.parameters())
    taken = []
    for k in range(MOST_STEPS):
        taken.append(step(k))
        row = {**_means(taken), "peak_bytes": peak() - start, "weights": weights}
        if k == 2:
            report.first(row)
        if k >= FEWEST_STEPS and sum(whole for _, whole in taken) > PATIENCE["seconds"]:
            break
    return row


def _means(taken):
    """Means, not best times: what some do only every tenth step (SOAP) is part of the price."""
    counted = taken[1:] or taken  # the first one warms up
    gradients, whole = (sum(column) / len(counted) for column in zip(*counted, strict=True))
    return {"gradient_s": gradients, "training_step_s": whole, "steps": len(counted)}

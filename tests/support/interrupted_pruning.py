"""A gradual pruning run that saves itself, and dies in mid-schedule: `python interrupted_pruning.py folder calls`."""

import os
import signal
import sys
from pathlib import Path

import torch
from models import cross_entropy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfac.pruning.gradual import GradualPruner
from mfac.pruning.schedules import geometric_schedule

SCHEDULE = geometric_schedule(0, 0.9, 4)


class CountedLoss:
    """The loss, which counts its calls and kills the process after so many; never without a number."""

    def __init__(self, die_after=None):
        self.calls, self.die_after = 0, die_after

    def __call__(self, model, batch):
        if self.calls == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return cross_entropy(model, batch)


def build(loss_fn=cross_entropy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    inputs = torch.randn(96, 6)
    data = TensorDataset(inputs, (inputs[:, :3] + inputs[:, 3:]).argmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(7))
    options = {"num_grads": 8, "block_size": 16, "recomputations": 2}
    pruner = GradualPruner(model, loss_fn, loader, SCHEDULE, optimizer=optimizer, **options)
    return model, optimizer, pruner, data


def train(model, optimizer, data, seed, loss_fn=cross_entropy):
    model.train()
    for batch in DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()  # dropout draws from the global random state
        optimizer.step()


def run(folder, die_after=None):
    """Goes on from the last checkpoint in the folder, and returns the end."""
    path = Path(folder) / "checkpoint.pt"
    loss_fn = CountedLoss(die_after)
    model, optimizer, pruner, data = build(loss_fn)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for name, part in (("pruner", pruner), ("model", model), ("optimizer", optimizer)):  # in any order
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
    while pruner.step() is not None:
        train(model, optimizer, data, pruner.steps_done, loss_fn)
        state = {"model": model, "optimizer": optimizer, "pruner": pruner}
        states = {name: part.state_dict() for name, part in state.items()}
        torch.save(states | {"random": torch.get_rng_state()}, f"{path}.new")
        os.replace(f"{path}.new", path)
    end = {"model": model.state_dict(), "masks": pruner.masks, "optimizer": optimizer.state_dict()}
    removed = [[record.removed for record in step] for step in pruner.history]
    return end | {"calls": loss_fn.calls, "removed": removed}


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))

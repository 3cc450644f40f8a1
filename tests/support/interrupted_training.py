"""Training that is killed at random and resumed, and training that is not: `python interrupted_training.py directory`.

The process that watches forks those that train, so that torch is imported once for all of them.
"""

import itertools
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which every run would import for itself otherwise, and that takes seconds
from optimizers import loss_of, network

from mfac import MFAC

STEPS = 60
MARKS = 4  # of a step, at which it may die: before and after itself, before and after its checkpoint
KILLS = 5


def save(state: dict[str, Any], path: Path) -> None:
    """In full or not at all: a process that is killed leaves the checkpoint of before."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train(directory: Path, kill_after: int | None) -> None:
    """Resumes from the last checkpoint, or begins; saves one after every step, and the final weights at the end."""
    model = network()
    optimizer = MFAC(
        model.named_parameters(), lr=0.05, num_grads=8, damping=0.01, momentum=0.9, weight_decay=1e-3, update_every=2
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint, first, marks = directory / "checkpoint.pt", 0, itertools.count(1)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)

    def mark() -> None:
        if next(marks) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        mark()
        optimizer.step()
        scheduler.step()
        mark()
        states = {name: part.state_dict() for name, part in parts.items()}
        mark()
        save({"step": step + 1, **states}, checkpoint)
        mark()
    save(model.state_dict(), directory / "final.pt")


def run(directory: Path, kill_after: int | None = None) -> None:
    """One run, which dies at one of its marks."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # a fork has no other threads
            train(directory, kill_after)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status == (0 if kill_after is None else signal.SIGKILL), "the run failed, or was over before the kill"


def main(directory: str) -> None:
    """The run that is left alone, and the one that is killed."""
    whole, killed = Path(directory) / "whole", Path(directory) / "killed"
    whole.mkdir()
    killed.mkdir()
    run(whole)
    generator = random.Random(4)
    for _ in range(KILLS):
        run(killed, generator.randint(1, MARKS * STEPS // KILLS))  # never as many as it has to go
    run(killed)


if __name__ == "__main__":
    main(*sys.argv[1:])

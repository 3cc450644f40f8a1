"""Training that is killed at random and resumed, and training that is not: `python interrupted_training.py directory`.

The process that watches forks those that train, so that torch is imported once for all of them.
"""

import json
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
MARKS = 4  # a step says so many times where it is: before and after itself, before and after its checkpoint
KILLS = 5
SEED = 4


def save(state: dict[str, Any], path: Path) -> None:
    """In full or not at all: a process that is killed leaves the checkpoint of before."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def train(directory: Path, pipe: int) -> None:
    """Resumes from the last checkpoint, or begins; saves one after every step, and the final weights at the end."""
    model = network()
    optimizer = MFAC(
        model.named_parameters(), lr=0.05, num_grads=8, damping=0.01, momentum=0.9, weight_decay=1e-3, update_every=2
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint, first = directory / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        os.write(pipe, b"g")
        optimizer.step()
        scheduler.step()
        os.write(pipe, b"s")
        states = {name: part.state_dict() for name, part in parts.items()}
        os.write(pipe, b"c")
        save({"step": step + 1, **states}, checkpoint)
        os.write(pipe, b"d")
    save(model.state_dict(), directory / "final.pt")


def run(directory: Path, kill_after: int | None = None) -> int:
    """One run, killed when it has said so many times where it is; how often it did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # a fork has no other threads
            train(directory, writer)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    marks = 0
    while marks != kill_after and os.read(reader, 1):
        marks += 1
    if kill_after is not None:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os.close(reader)
    assert status == (0 if kill_after is None else signal.SIGKILL), "the run failed, or was over before the kill"
    return marks


def main(directory: str) -> None:
    """The run that is left alone, and the one that is killed; how often each said where it was goes to a file."""
    whole, killed = Path(directory) / "whole", Path(directory) / "killed"
    whole.mkdir()
    killed.mkdir()
    generator = random.Random(SEED)
    marks = [generator.randint(1, MARKS * STEPS // KILLS) for _ in range(KILLS)]  # never as many as it has to go
    counts = {"whole": run(whole), "killed": sum(run(killed, mark) for mark in marks) + run(killed)}
    (Path(directory) / "marks.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])

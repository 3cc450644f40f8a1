"""One rank of a data-parallel run: `python interrupted_ranks.py folder rank size way [step at which it is killed]`.

It resumes from the checkpoint in the folder if there is one. A killed rank dies in mid-step: its products
are made, and the others wait for them.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_cases import Training, load_state, save_state

from mfac.distributed.groups import GroupRanks

STEPS, SAVED = 14, 6
OPTIONS = {"momentum": 0.9, "weight_decay": 0.01}


def run(group, way, folder, killed_at=None):
    """Trains to the end, with one checkpoint on the way, and writes the weights."""
    training, first = Training(group, way, **OPTIONS), 0
    if (folder / "checkpoint" / ".metadata").exists():
        load_state(training, folder / "checkpoint")
        first = SAVED
    for step in range(first, STEPS):
        if step == killed_at:
            GroupRanks.sum_ = lambda self, values: os.kill(os.getpid(), signal.SIGKILL)
        training.steps(range(step, step + 1))
        if step + 1 == SAVED:
            save_state(training, folder / "checkpoint")
    return training.weights()


def main(folder, rank, size, way, killed_at=None):
    folder, rank = Path(folder), int(rank)
    torch.set_num_threads(1)
    store = f"file://{folder / ('store' if killed_at is None else 'doomed')}"
    dist.init_process_group("gloo", store, timedelta(seconds=8), int(size), rank)
    mine = int(killed_at) if killed_at is not None and rank == 1 else None
    try:
        weights = run(dist.group.WORLD, way, folder, mine)
    except RuntimeError as error:
        (folder / f"failed-{rank}").write_text(str(error))
        os._exit(3)  # the group would wait for the one that is gone
    torch.save(weights, folder / f"weights-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One of two ranks, the second of which is killed in mid-step: `python interrupted_ranks.py folder rank`.

Its products are made, and the first rank waits for them.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_cases import Training

from mfac.distributed.groups import GroupRanks


def main(folder, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=8), 2, int(rank))
    training = Training(dist.group.WORLD, "ddp").steps(range(3))
    if rank == "1":
        GroupRanks.sum_ = lambda self, values: os.kill(os.getpid(), signal.SIGKILL)
    try:
        training.steps(range(3, 4))
    except RuntimeError as error:
        Path(folder, "message").write_text(str(error))
        os._exit(3)  # the group would wait for the rank that is gone


if __name__ == "__main__":
    main(*sys.argv[1:])

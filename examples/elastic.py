"""What the examples on several processes share: shares of a batch, and checkpoints that any number of processes reads.

`torchrun --max-restarts` starts all processes again when one of them dies; each then goes on from the last checkpoint
that is complete.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

BATCH = 64


def join(timeout: timedelta = timedelta(seconds=60)) -> None:
    """Joins the processes that torchrun has started.

    They meet in a store that outlives a restart, where gloo would find the addresses of the dead: so every attempt has
    a part of the store to itself.
    """
    address, size = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(*address, size, is_master=False, timeout=timeout)
    attempt = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=attempt, rank=int(os.environ["RANK"]), world_size=size, timeout=timeout)


def leave() -> None:
    """Leaves them when all are done.

    Gloo's threads need the interpreter to let go of what they have sent, and abort the process where it is just going
    away. FSDP2 keeps them alive when the group is destroyed, so they are given a moment.
    """
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)


def shares(data: tuple[Tensor, ...], epoch: int):
    """This process's share of every batch of an epoch; batches are the same for any number of processes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))
    for chosen in order.split(BATCH)[: len(order) // BATCH]:
        yield tuple(tensor[chosen[rank::size]] for tensor in data)


def save(folder: Path, epoch: int, model, optimizer) -> None:
    """Every process writes its part; the name of the checkpoint is written when all of them have."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"epoch-{epoch}")
    if dist.get_rank() == 0:
        (folder / "latest.part").write_text(str(epoch))
        os.replace(folder / "latest.part", folder / "latest")
    dist.barrier()


def load_latest(folder: Path, model, optimizer) -> int:
    """The epoch that the last checkpoint was written after, which is loaded; 0 where there is none."""
    if not (folder / "latest").exists():
        return 0
    epoch = int((folder / "latest").read_text())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / f"epoch-{epoch}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return epoch


def die_once(at_epoch: int | None, epoch: int) -> None:
    """Kills the second process the first time it gets there, to see that the run comes back."""
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if epoch == at_epoch and first_start and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

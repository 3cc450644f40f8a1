"""Examples of frameworks on two processes, as torchrun would start them: `framework_ranks.py folder`.

The processes are forked after the imports, which take longer than the training.
"""

import os
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which every process would import for itself otherwise
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_lightning
import train_transformers
from mfac import MFAC

SIZE = 2
RUNS = {train_transformers: ["--steps", "20"], train_lightning: ["--epochs", "2", "--ranks", str(SIZE)]}


def free_port():
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return bound.getsockname()[1]


def train(example, options, folder):
    """What one rank holds in the end, in a file."""
    built, build = [], MFAC.__init__

    def remember(self, *arguments, **settings):
        build(self, *arguments, **settings)
        built.append(self)

    MFAC.__init__ = remember
    model, losses = example.main([*options, "--folder", folder])[:2]
    MFAC.__init__ = build
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    rows = tuple(built[0]._window.operator.rows.shape)
    torch.save(
        {"weights": weights, "losses": losses, "rows": rows}, f"{folder}/{example.__name__}-{dist.get_rank()}.pt"
    )


def start(rank, port, folder):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_PORT": port}
        os.environ |= {"LOCAL_WORLD_SIZE": str(SIZE), "GROUP_RANK": "0", "MASTER_ADDR": "localhost"}
        os.environ |= {"TORCHELASTIC_RUN_ID": "none"}  # by which frameworks see that torchrun is at work
        torch.set_num_threads(1)
        for example, options in RUNS.items():
            train(example, options, folder)
        dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(folder):
    port = str(free_port())
    children = [start(rank, port, folder) for rank in range(SIZE)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The examples on two processes, as torchrun starts them: killed and restarted, and in frameworks."""

import importlib
import os
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from processes import in_process, started
from torch.utils.data import TensorDataset

from mfac import MFAC

EXAMPLES = str(Path(__file__).parents[2] / "examples")
OPTIONS = ["--epochs", "2", "--num-grads", "4", "--folder"]
FRAMEWORKS = {"train_transformers": ["--steps", "20"], "train_lightning": ["--epochs", "2", "--ranks", "2"]}


def example(name):
    sys.path.insert(0, EXAMPLES)
    return importlib.import_module(name)


def be_rank(rank, port, restart=0):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(restart)}


def one_rank(name, options, *where):
    be_rank(*where)
    module = example(name)
    train, test = module.load_data()
    module.load_data = lambda: (TensorDataset(*(tensor[:256] for tensor in train.tensors)), test)
    module.main(options)


def run(name, folder, *options, restart=0):
    """Whether both ranks end; when the second dies, so does the first."""
    folder.mkdir(exist_ok=True)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = [*OPTIONS, str(folder), *options]
    first, second = (started(one_rank, name, options, rank, store.port, restart) for rank in range(2))
    second.join()
    if second.exitcode:
        first.kill()
    first.join()
    return first.exitcode == second.exitcode == 0


def test_killed_and_restarted_or_not_the_examples_end_with_the_same_weights(tmp_path):
    """Fully sharded bit for bit; under DDP up to rounding."""
    folder, final = tmp_path / "killed", {}
    assert not run("train_fsdp2", folder, "--die-at", "1")
    assert (folder / "latest").read_text() == "1"
    before = (folder / "epoch-1" / ".metadata").stat().st_mtime_ns
    assert run("train_fsdp2", folder, "--die-at", "1", restart=1)
    assert (folder / "epoch-1" / ".metadata").stat().st_mtime_ns == before  # what was done was not done again
    assert all(run(name, tmp_path / name) for name in ("train_fsdp2", "train_ddp"))
    for name in ("killed", "train_fsdp2", "train_ddp"):
        final[name] = torch.load(tmp_path / name / "final.pt", weights_only=True)
    assert all(torch.equal(final["killed"][name], value) for name, value in final["train_fsdp2"].items())
    torch.testing.assert_close(final["train_ddp"], dict(final["train_fsdp2"]), rtol=1e-3, atol=1e-3)


def train_and_tell(name, folder, rank):
    """What a rank holds in the end, in a file."""
    built, build = [], MFAC.__init__

    def remember(self, *arguments, **settings):
        build(self, *arguments, **settings)
        built.append(self)

    MFAC.__init__ = remember
    model, losses = example(name).main([*FRAMEWORKS[name], "--folder", str(folder)])[:2]
    MFAC.__init__ = build
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    rows = tuple(built[0]._window.operator.rows.shape)
    torch.save({"weights": weights, "losses": losses, "rows": rows}, folder / f"{name}-{rank}.pt")


def train_in_frameworks(folder):
    """Both ranks are forked after the imports, which take longer than the training."""
    for name in FRAMEWORKS:
        example(name)
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        port = bound.getsockname()[1]
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                be_rank(rank, port)
                for name in FRAMEWORKS:
                    train_and_tell(name, folder, rank)
                dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    sys.exit(max(os.waitpid(child, 0)[1] != 0 for child in children))


def test_frameworks_train_with_half_a_window_a_process(tmp_path):
    assert in_process(train_in_frameworks, tmp_path) == 0
    for name in FRAMEWORKS:
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]
        assert all(torch.equal(ranks[0]["weights"][key], tensor) for key, tensor in ranks[1]["weights"].items())
        dim = sum(tensor.numel() for tensor in ranks[0]["weights"].values())
        assert ranks[0]["rows"][1] == ranks[1]["rows"][1] < 0.51 * dim + 20
        losses = ranks[0]["losses"]
        few = max(1, len(losses) // 4)
        assert sum(losses[-few:]) < sum(losses[:few])

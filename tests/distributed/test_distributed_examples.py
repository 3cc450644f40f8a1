"""The examples on several processes: killed under torchrun, in the pool, and in frameworks."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from rank_pool import RankPool

ROOT = Path(__file__).parents[2]
OPTIONS = ["--epochs", "2", "--num-grads", "4", "--folder"]


def python(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", *map(str, command)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_the_pool(group, name, folder):
    """All processes of the pool are the world of the example, which has nothing to join."""
    folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        example = importlib.import_module(name)
    finally:
        sys.path.pop(0)
    example.join = example.leave = lambda: None
    example.main([*OPTIONS, str(folder)])


def test_killed_and_restarted_or_not_the_examples_end_with_the_same_weights(tmp_path):
    """Fully sharded bit for bit; under DDP up to rounding."""
    (tmp_path / "killed").mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    launcher += ["--monitor-interval", 0.2]
    said = python(*launcher, ROOT / "examples" / "train_fsdp2.py", *OPTIONS, tmp_path / "killed", "--die-at", 1)
    assert said.count("epoch 1") == said.count("epoch 2") == 1  # what was done was not done again
    pool = RankPool(tmp_path, 2)
    for name in ("train_fsdp2", "train_ddp"):
        pool.run(2, in_the_pool, name, tmp_path / name)
    pool.close()
    names = ("killed", "train_fsdp2", "train_ddp")
    killed, whole, other = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in names)
    assert all(torch.equal(killed[name], value) for name, value in whole.items())
    torch.testing.assert_close(other, dict(whole), rtol=1e-3, atol=1e-3)


def test_frameworks_train_with_half_a_window_a_process(tmp_path):
    python(ROOT / "tests" / "support" / "framework_ranks.py", tmp_path)
    for example in ("train_transformers", "train_lightning"):
        ranks = [torch.load(tmp_path / f"{example}-{rank}.pt", weights_only=True) for rank in range(2)]
        assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in ranks[1]["weights"].items())
        dim = sum(tensor.numel() for tensor in ranks[0]["weights"].values())
        assert ranks[0]["rows"][1] == ranks[1]["rows"][1] < 0.51 * dim + 20
        losses = ranks[0]["losses"]
        few = max(1, len(losses) // 4)
        assert sum(losses[-few:]) < sum(losses[:few])

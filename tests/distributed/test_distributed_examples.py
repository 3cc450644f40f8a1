"""The examples on two processes, as torchrun starts them; Hugging Face's Trainer and Lightning under DDP."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def torchrun(*command, restarts=0):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", str(restarts), "--monitor-interval", "0.2"]
    done = subprocess.run([*launcher, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def final_weights(folder, example, *options, restarts=0):
    folder.mkdir()
    command = [ROOT / "examples" / f"{example}.py", "--epochs", "2", "--num-grads", "16", "--folder", folder]
    said = torchrun(*command, *options, restarts=restarts)
    assert said.count("epoch 1") == said.count("epoch 2") == 1  # what was done was not done again
    return torch.load(folder / "final.pt", weights_only=True)


def test_sharded_and_killed_or_neither_the_examples_end_with_the_same_weights(tmp_path):
    """Up to rounding: DDP and FSDP2 sum over ranks in another order."""
    killed = final_weights(tmp_path / "killed", "train_fsdp2", "--die-at", "1", restarts=1)
    whole = final_weights(tmp_path / "whole", "train_ddp")
    torch.testing.assert_close(killed, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("example", "options"),
    [("train_transformers", ["--steps", "20"]), ("train_lightning", ["--epochs", "2", "--ranks", "2"])],
)
def test_frameworks_train_with_half_a_window_a_process(tmp_path, example, options):
    torchrun(Path(__file__).parents[1] / "support" / "framework_ranks.py", example, tmp_path, *options)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in ranks[1]["weights"].items())
    dim = sum(tensor.numel() for tensor in ranks[0]["weights"].values())
    assert ranks[0]["rows"][1] == ranks[1]["rows"][1] < 0.51 * dim + 20
    losses = ranks[0]["losses"]
    few = max(1, len(losses) // 4)
    assert sum(losses[-few:]) < sum(losses[:few])

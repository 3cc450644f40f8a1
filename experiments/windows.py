"""Storages of the window in training: how close the steps are to uncompressed ones, and how well it learns.

    python -m experiments.windows digits     # an MLP on scikit-learn's digits, five seeds: some minutes
    python -m experiments.windows cifar10    # ResNet20 on CIFAR-10, 400 steps: some hours on one core
    python -m experiments.windows stsb       # MiniLM (17 million weights) on STS-B of GLUE, one epoch: an hour or two

Two things are measured. `run`: the whole training with each storage, as experiments.optimizers does it (its M-FAC
setting, a cosine schedule): last loss and accuracy. `steps`: training goes on with float32 rows, and every storage sees
the same gradients beside it; the cosine between its step and the uncompressed one, and the ratio of their lengths.
A top-k step is F⁻¹ of the compressed row, most of whose entries are zero: it is meant to be right over many steps, not
in each. So the cosine between sums of steps, over as many as the window has rows, is there too.
"""

import argparse
import math
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mfac
from experiments import minilm
from experiments.ledger import Ledger
from experiments.optimizers import TASKS, Task, last_loss, train
from mfac.windows import Window

STORAGES: dict[str, Window] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int8, stochastic": mfac.Int8(stochastic=True),
    "top-k 10 %": mfac.TopK(0.1, block=1 << 14),  # two blocks in the network of digits
    "top-k 1 %": mfac.TopK(0.01, block=1 << 14),
}
# Of experiments.optimizers: the settings that its search chose for M-FAC, in the units of normalize="sum".
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 1.0, "num_grads": 256, "damping": 0.1},
    "cifar10": {"lr": 1.0, "num_grads": 512, "damping": 512e-5, "weight_decay": 3e-3},
}
STEPS = {"digits": 440, "cifar10": 400}


def optimizer_of(name: str, params: Iterable[Tensor], window: Window) -> mfac.MFAC:
    return mfac.MFAC(params, **SETTINGS[name], normalize="sum", window=window)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a, b, dim=0))


class Follower:
    """A window in one storage that sees every gradient, and what its steps are beside the uncompressed ones."""

    def __init__(self, window: Window, dim: int, settings: dict[str, Any]):
        self.op = mfac.DynamicInverseFisher(
            settings["num_grads"], dim, settings["damping"], normalize="sum", window=window
        )
        self.total = torch.zeros(dim)
        self.cosines: list[float] = []
        self.lengths: list[float] = []
        self.of_sums: list[float] = []

    def see(self, gradient: Tensor, reference: Tensor, reference_total: Tensor, whole: bool) -> None:
        step = self.op.update_and_apply(gradient)
        self.total += step
        self.cosines.append(round(cosine(step, reference), 5))
        self.lengths.append(round(float(step.norm() / reference.norm()), 5))
        if whole:
            self.of_sums.append(round(cosine(self.total, reference_total), 5))
            self.total.zero_()

    def record(self) -> dict[str, Any]:
        return {"cosines": self.cosines, "lengths": self.lengths, "cosines_of_sums": self.of_sums}


def follow(name: str, task: Task, steps: int, seed: int) -> dict[str, Any]:
    """Trains with float32 rows while every other storage computes its own steps from the same gradients."""
    settings, model = SETTINGS[name], task.model(seed)
    params = list(model.parameters())
    reference = mfac.DynamicInverseFisher(
        settings["num_grads"], sum(p.numel() for p in params), settings["damping"], normalize="sum"
    )
    followers = {
        key: Follower(kind, reference.shape[0], settings) for key, kind in STORAGES.items() if key != "float32"
    }
    total = torch.zeros(reference.shape[0])
    for t, (inputs, labels) in enumerate(islice(task.batches(seed), steps), 1):
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        weights = torch.nn.utils.parameters_to_vector(params).detach()
        gradient = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        gradient += settings.get("weight_decay", 0.0) * weights
        step = reference.update_and_apply(gradient)
        total += step
        whole = t % settings["num_grads"] == 0 or t == steps
        for follower in followers.values():
            follower.see(gradient, step, total, whole)
        if whole:
            total.zero_()
        lr = settings["lr"] * (1 + math.cos(math.pi * (t - 1) / steps)) / 2
        torch.nn.utils.vector_to_parameters(weights - lr * step, params)
    return {key: follower.record() for key, follower in followers.items()}


def measure(name: str) -> None:
    """The steps of one run, and the runs of every storage and seed."""
    task, steps = TASKS[name][0](), STEPS[name]
    ledger = Ledger(f"windows_{name}", f"python -m experiments.windows {name}")
    followed = ledger.cell("steps, seed 1", partial(follow, name, task, steps, 1))
    for key, record in followed.items():
        tail = record["cosines"][len(record["cosines"]) // 2 :]
        print(f"{key}: cosine {sum(tail) / len(tail):.4f} on average, {min(tail):.4f} at least, of sums", end=" ")
        print(record["cosines_of_sums"])
    for key, window in STORAGES.items():
        runs = []
        for seed in range(1, task.seeds + 1):
            make = partial(optimizer_of, name, window=window)
            runs.append(ledger.cell(f"run, {key}, seed {seed}", partial(train, task, make, steps, seed)))
        losses, accuracies = [last_loss(run) for run in runs], [run["tests"][-1][1] for run in runs]
        spread = torch.tensor(accuracies).std().item() if len(runs) > 1 else float("nan")
        mean = sum(losses) / len(losses), sum(accuracies) / len(runs)
        print(f"{key}: loss {mean[0]:.4f} ({min(losses):.4f} to {max(losses):.4f}), {mean[1]:.2f} % ± {spread:.2f}")


def train_sentences(window: Window, num_grads: int, lr: float = 0.5, damping: float = 0.1) -> dict[str, Any]:
    """One epoch of STS-B: cosines of sentence pairs against their scores, and the rank correlation on the dev set."""
    torch.manual_seed(0)
    model, batches, dev = minilm.load(), minilm.pairs("train", 32), minilm.pairs("dev", 64)
    optimizer = mfac.MFAC(model.parameters(), lr, num_grads, damping, normalize="sum", window=window)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + math.cos(math.pi * t / len(batches))) / 2)
    before, losses = minilm.spearman(model, dev), []
    for i in torch.randperm(len(batches), generator=torch.Generator().manual_seed(1)).tolist():
        inputs, scores = batches[i]
        optimizer.zero_grad()
        loss = F.mse_loss(model(*inputs), scores)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(round(loss.item(), 5))
    return {"before": before, "after": minilm.spearman(model, dev), "losses": losses, "seconds": optimizer.seconds}


def sentences() -> None:
    """Windows that fit 8 GiB: of 32 gradients in float32, of up to 512 in the others."""
    ledger = Ledger("windows_stsb", "python -m experiments.windows stsb")
    for key, num_grads in (("float32", 32), ("int8", 32), ("int8", 256), ("top-k 1 %", 32), ("top-k 1 %", 512)):
        run = ledger.cell(f"{key}, m {num_grads}", partial(train_sentences, STORAGES[key], num_grads))
        print(f"{key}, m = {num_grads}: rank correlation {run['before']:.4f} before, {run['after']:.4f} after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*SETTINGS, "stsb"])
    task = parser.parse_args().task
    if task == "stsb":
        sentences()
    else:
        measure(task)


if __name__ == "__main__":
    main()

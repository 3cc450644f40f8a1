"""Storages of the window in training: how close the steps are to uncompressed ones, and how well training works.

    python -m experiments.windows digits     # an MLP on scikit-learn's digits: some minutes
    python -m experiments.windows cifar10    # ResNet20 on a quarter of CIFAR-10, three epochs: 80 minutes of one core
    python -m experiments.windows sst2       # MiniLM on SST-2 of GLUE, 100 steps: 20 minutes of one core
    python -m experiments.windows bert_tiny  # BERT-tiny, untrained, on SST-2 with 1,024 gradients; one seed
    python -m experiments.windows bert_short # the same with 256 gradients, also in float32, and by Adam and SGD
    python -m experiments.windows table      # the results

The others have five seeds; `--seeds 1 2` runs some of them, in parallel with another process that runs the rest.

`run` cells are whole trainings with each storage, like those of experiments.optimizers (its settings for M-FAC, a
cosine schedule) or of the recipe `bert`: last loss and accuracy. `steps` cells are one training with float32 rows, in
which every storage sees the same gradients: the cosine between its step and the uncompressed one, and the ratio of
their lengths. A top-k step is F⁻¹ of the compressed row, most of whose entries are zero; it is accurate over many steps
rather than in each. So the cosine between sums of steps, over as many as the window has rows, is measured too.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mfac
from experiments import data
from experiments.ledger import Ledger
from experiments.models.bert import bert_tiny
from experiments.models.sentence_classifier import minilm_sentences
from experiments.optimizers import TASKS, Task, accuracies, train
from experiments.recipes import bert
from experiments.training import cosine as cosine_schedule
from experiments.training import cross_entropy, last_loss
from mfac.app.runs.environment import process_peak_bytes
from mfac.windows.storage import Window

STORAGES: dict[str, Window] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int8, stochastic": mfac.Int8(stochastic=True),
    "top-k 10 %": mfac.TopK(0.1, block=1 << 14),  # two blocks in the digits network
    "top-k 1 %": mfac.TopK(0.01, block=1 << 14),
}
# The settings that the search of experiments.optimizers chose for M-FAC, with normalize="sum".
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 1.0, "num_grads": 256, "damping": 0.1},
    "cifar10": {"lr": 1.0, "num_grads": 256, "damping": 512e-5, "weight_decay": 3e-3},
}
STEPS = {"digits": 440, "cifar10": 300}
SEEDS = (1, 2, 3, 4, 5)
CHOSEN = ("float32", "bfloat16", "int8", "top-k 1 %")  # for tasks that take long
IMAGES = 12_800  # of CIFAR-10, a hundred batches
# The best learning rate after 50 steps, of 0.1, 0.3 and 1.
SST2, SST2_RATE = replace(bert.RECIPE.small, steps=100, window=64, dev=400), 0.3
# {task: settings, how its model is made, storages: the smallest first, so that its peak memory is measured}. With 1,024
# gradients of BERT-tiny a window takes 18 GB in float32, and there are more steps than it has rows.
SENTENCES: dict[str, tuple[bert.Settings, bert.Maker, tuple[str, ...]]] = {
    "sst2": (SST2, minilm_sentences, CHOSEN),
    "bert_tiny": (replace(SST2, steps=1100, window=1024, train=20_000), bert_tiny, ("top-k 1 %", "int8")),
    "bert_short": (replace(SST2, steps=300, window=256, train=20_000), bert_tiny, ("top-k 1 %", "int8", "float32")),
}
# Whether so few steps are enough for any optimizer: {optimizer: learning rates}.
RATES: dict[str, tuple[float, ...]] = dict.fromkeys(("Adam", "FullMatrixAdam", bert.ORTHOGONALIZED), (3e-4, 1e-3, 3e-3))
RIVALS = {"bert_short": RATES | {"SGD": (0.01, 0.03, 0.1), "M-FAC": (0.003, 0.03)}}


def cosine(a: Tensor, b: Tensor) -> float:
    return round(float(F.cosine_similarity(a, b, dim=0)), 5)


def follow(name: str, task: Task, steps: int, seed: int) -> dict[str, Any]:
    """Trains with float32 rows while every other storage computes its steps from the same gradients."""
    settings, model = SETTINGS[name], task.model(seed)
    params = list(model.parameters())
    dim, num_grads = sum(p.numel() for p in params), settings["num_grads"]
    windows = {
        key: mfac.DynamicInverseFisher(num_grads, dim, settings["damping"], normalize="sum", window=window)
        for key, window in STORAGES.items()
    }
    sums = {key: torch.zeros(dim) for key in STORAGES}
    records: dict[str, dict[str, list[float]]] = {
        key: {"cosines": [], "lengths": [], "cosines_of_sums": []} for key in STORAGES if key != "float32"
    }
    for t, batch in enumerate(islice(task.batches(seed), steps), 1):
        model.zero_grad()
        cross_entropy(model, batch).backward()
        decay = settings.get("weight_decay", 0.0)
        gradient = torch.cat([(p.grad + decay * p.detach()).flatten() for p in params if p.grad is not None])
        found = {key: window.update_and_apply(gradient) for key, window in windows.items()}
        step = found["float32"]
        for key, record in records.items():
            record["cosines"].append(cosine(found[key], step))
            record["lengths"].append(round(float(found[key].norm() / step.norm()), 5))
        for key, total in sums.items():
            total += found[key]
        if t % num_grads == 0 or t == steps:
            for key, record in records.items():
                record["cosines_of_sums"].append(cosine(sums[key], sums["float32"]))
            for total in sums.values():
                total.zero_()
        lr = settings["lr"] * cosine_schedule((t - 1) / steps)
        with torch.no_grad():
            for p, change in zip(params, step.split([p.numel() for p in params]), strict=True):
                p.sub_(lr * change.view_as(p))
    return records


def build(name: str) -> Task:
    """A task of experiments.optimizers; CIFAR-10 with some of its images, and one test at the end."""
    task: Task = TASKS[name][0]()
    if name != "cifar10":
        return task
    images, labels = (part[:IMAGES] for part in data.cifar10("train"))

    def batches(seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        part = data.ImageBatches(images, labels, 128, data.CIFAR10, seed=seed, augment=True)
        return chain.from_iterable(repeat(part))

    return replace(task, batches=batches, test_every=STEPS[name])


def measure(name: str, seeds: Sequence[int]) -> None:
    task, steps = build(name), STEPS[name]
    ledger = ledger_of(name)
    if SEEDS[0] in seeds:
        ledger.cell(f"steps, seed {SEEDS[0]}", partial(follow, name, task, steps, SEEDS[0]))
    for seed in seeds:
        for key in STORAGES if name == "digits" else CHOSEN:
            make = partial(mfac.MFAC, **SETTINGS[name], normalize="sum", window=STORAGES[key])
            ledger.cell(f"run, {key}, seed {seed}", partial(train, task, make, steps, seed))


def measure_sentences(name: str, seeds: Sequence[int]) -> None:
    settings, make_model, storages = SENTENCES[name]
    ledger, run = ledger_of(name), partial(bert.tuned, task="sst2", make_model=make_model)
    for seed in seeds:
        for key in storages:
            stored = replace(settings, storage=STORAGES[key])
            ledger.cell(
                f"run, {key}, seed {seed}",
                lambda seed=seed, stored=stored: (
                    run("M-FAC", SST2_RATE, seed=seed, settings=stored)
                    | {"peak_gib": round(process_peak_bytes() / 2**30, 2)}
                ),
            )
    dense = replace(settings, storage=torch.float32)
    for optimizer, rates in RIVALS.get(name, {}).items():
        for lr in rates:
            key = f"rival, {optimizer}, lr {lr:g}"
            ledger.cell(key, partial(run, optimizer, lr, seed=SEEDS[0], settings=dense))


def ledger_of(name: str) -> Ledger:
    return Ledger(f"windows_{name}", f"python -m experiments.windows {name}")


def table() -> None:
    for name in (*SETTINGS, *SENTENCES):
        cells = ledger_of(name).cells
        for key, record in cells.get(f"steps, seed {SEEDS[0]}", {}).items():
            tail = record["cosines"][len(record["cosines"]) // 2 :]
            print(f"{name}, {key}: cosine {sum(tail) / len(tail):.4f} on average, {min(tail):.4f} at least", end=", ")
            print(f"of sums {record['cosines_of_sums']}")
        for key in STORAGES:
            runs = [run for title, run in cells.items() if title.startswith(f"run, {key}, seed")]
            if runs:
                losses, percents = [last_loss(run) for run in runs], [accuracies(run)[1][-1] for run in runs]
                told = f"{mean(losses):.4f} ± {deviation(losses):.4f}, {mean(percents):.2f} ± {deviation(percents):.2f}"
                print(f"{name}, {key}, {len(runs)} seeds: {told} %")
        for title, run in cells.items():
            if title.startswith("rival"):
                print(f"{name}, {title}: {last_loss(run):.4f}, {accuracies(run)[1][-1]:.2f} %")


def deviation(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*SETTINGS, *SENTENCES, "table"])
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, help="all; of BERT-tiny the first")
    given = parser.parse_args()
    seeds = given.seeds or (SEEDS[:1] if given.task.startswith("bert") else SEEDS)
    if given.task != "table":
        (measure_sentences if given.task in SENTENCES else measure)(given.task, seeds)
    table()


if __name__ == "__main__":
    main()

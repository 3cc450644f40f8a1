"""ResNet20 on CIFAR-10 gradually to 95 and 98 %, with fine-tuning in between: M-FAC against magnitude at equal cost.

    python -m experiments.gradual_pruning run     # a search, then two runs of about 12 minutes on one core; resumable
    python -m experiments.gradual_pruning plot    # the picture and the table of the results

Both have the same schedule, the paper's cycle of learning rates, momentum reset at each step, and the same cost in
images: half an epoch per step. M-FAC spends 5,120 images of it on gradients, and the cost of 7 mini-batches on
batch-norm statistics; magnitude trains on all of it. At 95 and at 98 % a copy is trained for 60 more mini-batches. Each
has its own search of the learning rate: one step to 80 % and 104 mini-batches (including the cost of pruning) at each
of three rates.
"""

import argparse
import copy
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import data, drawing
from experiments.baselines.pruning import PAPER
from experiments.ledger import IMAGES, RESULTS, Ledger
from experiments.models.resnet import mfac_resnet20
from experiments.training import RUNS, Checkpoint, cross_entropy
from mfac.pruning import GradualPruner, attach_masks, learning_rate_cycle

COMMAND = "python -m experiments.gradual_pruning run"
SCHEDULE = [0.8, 0.9, 0.95, 0.98]
ENDS = (0.95, 0.98)
LEARNING_RATES = (0.005, 0.02, 0.05)  # the first is the paper's
BATCH_SIZE = 128
PERIOD, SEARCH_PERIOD, TAIL, TAIL_DROPS = 195, 104, 60, (30, 48)
GRADIENTS = {"num_grads": 64, "recomputations": 5}
GRADIENT_BATCH = 16
# In mini-batches of training: the gradients of a step, and 4 batches through batch norm after each recomputation.
BN_BATCHES = 4
COST = GRADIENTS["num_grads"] * GRADIENTS["recomputations"] * GRADIENT_BATCH // BATCH_SIZE + 7
METHODS: dict[str, dict[str, Any]] = {
    "M-FAC": {"method": "mfac", "cost": COST, "damping": "auto", "bn": True, **GRADIENTS},
    "magnitude": {"method": "magnitude", "cost": 0, "bn": False, "num_grads": 1, "recomputations": 1},
}


def batches(size: int, seed: int) -> data.ImageBatches:
    return data.cifar_batches(size, data.HALVES, seed)


def accuracy(model: nn.Module, images: int = 1000) -> float:
    return data.make_test(data.HALVES, images)(model)["accuracy"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, source: Any, count: int) -> float:
    """Trains on `count` batches; processor seconds."""
    began = time.process_time()
    model.train()
    for batch in itertools.islice(source, count):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    return time.process_time() - began


def finished(model: nn.Module, masks: dict[str, torch.Tensor], lr: float, seed: int) -> float:
    """Test accuracy of a copy after the last training at this sparsity."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    attach_masks(optimizer, masks, model)
    scheduler = learning_rate_cycle(optimizer, 1, 0, drops=TAIL_DROPS)
    train(model, optimizer, scheduler, batches(BATCH_SIZE, seed), TAIL)
    named = dict(model.named_parameters())
    assert all(not named[name][~mask].count_nonzero() for name, mask in masks.items())
    return accuracy(model, 10_000)


class Run:
    """One method through the whole schedule, saved after every step."""

    def __init__(self, name: str, period: int, lr: float):
        settings = METHODS[name]
        self.name, self.lr, self.period = name, lr, period - settings["cost"]
        self.model = mfac_resnet20()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        self.scheduler = learning_rate_cycle(self.optimizer, self.period, len(SCHEDULE), low=self.period // 3)
        options = {key: value for key, value in settings.items() if key not in ("cost", "bn")}
        bn_batches = list(itertools.islice(batches(BATCH_SIZE, 3000), BN_BATCHES)) if settings["bn"] else None
        self.pruner = GradualPruner(
            self.model, cross_entropy, lambda step: batches(GRADIENT_BATCH, step), SCHEDULE, optimizer=self.optimizer,
            reset_momentum=True, progress=False, bn_batches=bn_batches, **PAPER | options,
        )  # fmt: skip
        self.rows: list[dict[str, float]] = []
        self.checkpoint = Checkpoint(
            RUNS / f"gradual_{name}_{period}_{lr}.pt", model=self.model, optimizer=self.optimizer,
            scheduler=self.scheduler, pruner=self.pruner,
        )  # fmt: skip

    def step(self) -> dict[str, float] | None:
        """Prunes to the next sparsity, trains, tests and saves; None at the end."""
        began = time.process_time()
        result = self.pruner.step()
        if result is None:
            return None
        row = {"sparsity": result.sparsity, "pruning_seconds": round(time.process_time() - began, 1)}
        row["pruned"] = accuracy(self.model)
        number = self.pruner.steps_done
        source = batches(BATCH_SIZE, 1000 + number)
        row["training_seconds"] = round(train(self.model, self.optimizer, self.scheduler, source, self.period), 1)
        row["trained"] = accuracy(self.model)
        if SCHEDULE[number - 1] in ENDS:
            row["finished"] = finished(self.model, self.pruner.masks, self.lr, 2000 + number)
        self.rows.append(row)
        print(f"  {self.name}: {row}", flush=True)
        self.checkpoint.save(rows=self.rows)
        return row

    def whole(self) -> list[dict[str, float]]:
        self.rows = (self.checkpoint.load() or {"rows": []})["rows"]
        while self.step():
            pass
        return self.rows


def run(only: str | None = None, folder: Path = RESULTS) -> None:
    ledger = Ledger("gradual_resnet20", COMMAND, folder)
    ledger.record["settings"] = {
        "schedule": SCHEDULE, "batch_size": BATCH_SIZE, "period": PERIOD, "search_period": SEARCH_PERIOD, "tail": TAIL,
        "gradient_batch": GRADIENT_BATCH, "runs": METHODS,
    }  # fmt: skip
    ledger.cell("dense", lambda: accuracy(mfac_resnet20(), 10_000))
    for name in METHODS if only is None else [only]:
        for lr in LEARNING_RATES:
            ledger.cell(searched(name, lr), lambda n=name, r=lr: Run(n, SEARCH_PERIOD, r).step())
        best = max(LEARNING_RATES, key=lambda lr, n=name: ledger.cells[searched(n, lr)]["trained"])
        ledger.cell(name, lambda n=name, r=best: {"learning_rate": r, "steps": Run(n, PERIOD, r).whole()})


def searched(name: str, lr: float) -> str:
    return f"search, {name}, lr {lr:g}"


def plot(folder: Path = RESULTS, images: Path = IMAGES) -> Path:
    cells = Ledger("gradual_resnet20", COMMAND, folder).cells
    print(f"dense {cells['dense']:.2f}")
    figure, ((axis,),) = drawing.panels()
    for number, name in enumerate(name for name in METHODS if name in cells):
        rows = cells[name]["steps"]
        steps = [i + offset for i in range(len(rows)) for offset in (0, 0.7)]
        values = [row[key] for row in rows for key in ("pruned", "trained")]
        axis.plot(steps, values, label=f"{name}: after pruning, after training", **drawing.style(number))
        ends = drawing.curve((i + 0.7, row["finished"]) for i, row in enumerate(rows) if "finished" in row)
        spent = [round(sum(row[key] for row in rows)) for key in ("pruning_seconds", "training_seconds")]
        print(f"{name}: learning rate {cells[name]['learning_rate']:g}, {ends[1]} %, pruning and training {spent} s")
        axis.plot(*ends, f"C{number}*", markersize=11, label=f"{name}: after the last training")
    axis.axhline(cells["dense"], color="0.6", linewidth=1, linestyle="--")
    axis.set_xticks(range(len(SCHEDULE)), [f"{100 * sparsity:.1f} %" for sparsity in SCHEDULE])
    axis.set(xlabel="sparsity", ylabel="test accuracy, %", title="ResNet20 on CIFAR-10, pruned gradually")
    axis.legend(fontsize=8)
    return drawing.save(figure, images / "gradual.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plot"])
    parser.add_argument("--only", choices=list(METHODS), help="one of the two, so that both can run in parallel")
    arguments = parser.parse_args()
    run(arguments.only) if arguments.what == "run" else plot()


if __name__ == "__main__":
    main()

"""ResNet20 on CIFAR-10 gradually to 95 and 98 %, with fine-tuning in between: M-FAC against magnitude at one budget.

    python -m experiments.gradual_pruning run     # a search, then two runs of some 12 minutes on one core; resumable
    python -m experiments.gradual_pruning plot    # the picture and the table of what was measured

The same schedule, the paper's cycle of learning rates, momentum reset at each step, and the same cost in images: half
an epoch a step. M-FAC spends 5,120 images of it on gradients, and what 7 mini-batches take on batch-norm statistics;
magnitude trains on all of it. At 95 and at 98 % a copy is trained for 60 mini-batches more. The learning rate is
searched for each by itself: one step to 80 % and 104 mini-batches (the pruning's share counted) at each of three rates.
"""

import argparse
import copy
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mfac
from experiments import data
from experiments.ledger import RESULTS, Ledger
from experiments.models.resnet import mfac_resnet20
from mfac.pruning import GradualPruner, attach_masks, learning_rate_cycle
from mfac.pruning.atomic_file import replacing

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
RUNS: dict[str, dict[str, Any]] = {
    "M-FAC": {"method": "mfac", "cost": COST, "damping": "auto", "bn": True, **GRADIENTS},
    "magnitude": {"method": "magnitude", "cost": 0, "bn": False, "num_grads": 1, "recomputations": 1},
}
CHECKPOINTS = data.data_folder().parent / "runs"


class Images:
    """The training and the test images, loaded once."""

    def __init__(self) -> None:
        self.train = data.load_cifar10("train")
        images, labels = data.load_cifar10("test")
        self.test = data.ImageBatches(images, labels, 250, data.HALVES)
        self.some = data.ImageBatches(images[:1000], labels[:1000], 250, data.HALVES)

    def batches(self, size: int, seed: int) -> data.ImageBatches:
        return data.ImageBatches(*self.train, size, data.HALVES, seed=seed, augment=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, batches: Any, count: int) -> float:
    """Trains on `count` batches; processor seconds."""
    began = time.process_time()
    model.train()
    for images, labels in itertools.islice(batches, count):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    return time.process_time() - began


def finished(model: nn.Module, masks: dict[str, torch.Tensor], images: Images, lr: float, seed: int) -> float:
    """Test accuracy of a copy that is trained to an end at this sparsity."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    attach_masks(optimizer, masks, model)
    scheduler = learning_rate_cycle(optimizer, 1, 0, drops=TAIL_DROPS)
    train(model, optimizer, scheduler, images.batches(BATCH_SIZE, seed), TAIL)
    named = dict(model.named_parameters())
    assert all(not named[name][~mask].count_nonzero() for name, mask in masks.items())
    return data.accuracy(model, images.test)


class Run:
    """One way of pruning through the whole schedule, saved after every step."""

    def __init__(self, name: str, period: int, lr: float, images: Images):
        settings = RUNS[name]
        self.name, self.images, self.lr, self.period = name, images, lr, period - settings["cost"]
        self.path = CHECKPOINTS / f"gradual_{name}_{period}_{lr}.pt"
        self.model = mfac_resnet20()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        self.scheduler = learning_rate_cycle(self.optimizer, self.period, len(SCHEDULE), low=self.period // 3)
        options = {key: value for key, value in settings.items() if key not in ("cost", "bn")}
        bn_batches = list(itertools.islice(images.batches(BATCH_SIZE, 3000), BN_BATCHES)) if settings["bn"] else None
        self.pruner = GradualPruner(
            self.model, mfac.criterion_loss(nn.CrossEntropyLoss()), lambda step: images.batches(GRADIENT_BATCH, step),
            SCHEDULE, optimizer=self.optimizer, reset_momentum=True, progress=False, bn_batches=bn_batches, **options,
        )  # fmt: skip
        self.rows: list[dict[str, float]] = []
        self._parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "pruner": self.pruner,
        }

    def step(self) -> bool:
        """The next sparsity: pruned, trained, tested, saved; False at the end."""
        began = time.process_time()
        result = self.pruner.step()
        if result is None:
            return False
        row = {"sparsity": result.sparsity, "pruning_seconds": round(time.process_time() - began, 1)}
        row["pruned"] = data.accuracy(self.model, self.images.some)
        number = self.pruner.steps_done
        batches = self.images.batches(BATCH_SIZE, 1000 + number)
        row["training_seconds"] = round(train(self.model, self.optimizer, self.scheduler, batches, self.period), 1)
        row["trained"] = data.accuracy(self.model, self.images.some)
        if SCHEDULE[number - 1] in ENDS:
            row["finished"] = finished(self.model, self.pruner.masks, self.images, self.lr, 2000 + number)
        self.rows.append(row)
        print(f"  {self.name}: {row}", flush=True)
        self._save()
        return True

    def _save(self) -> None:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as draft:
            torch.save(state | {"rows": self.rows}, draft)

    def resume(self) -> None:
        """Goes on after the last step that was saved."""
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            self.rows = state["rows"]

    def whole(self) -> list[dict[str, float]]:
        self.resume()
        while self.step():
            pass
        return self.rows

    def first_step(self) -> dict[str, float]:
        self.step()
        return self.rows[0]


def run(only: str | None) -> None:
    ledger = Ledger("gradual_resnet20", COMMAND)
    ledger.record["settings"] = {
        "schedule": SCHEDULE, "batch_size": BATCH_SIZE, "period": PERIOD, "search_period": SEARCH_PERIOD, "tail": TAIL,
        "gradient_batch": GRADIENT_BATCH, "runs": RUNS,
    }  # fmt: skip
    images = Images()
    ledger.cell("dense", lambda: data.accuracy(mfac_resnet20(), images.test))
    for name in RUNS if only is None else [only]:
        for lr in LEARNING_RATES:
            ledger.cell(searched(name, lr), lambda n=name, r=lr: Run(n, SEARCH_PERIOD, r, images).first_step())
        best = max(LEARNING_RATES, key=lambda lr, n=name: ledger.cells[searched(n, lr)]["trained"])
        ledger.cell(name, lambda n=name, r=best: {"learning_rate": r, "steps": Run(n, PERIOD, r, images).whole()})


def searched(name: str, lr: float) -> str:
    return f"search, {name}, lr {lr:g}"


def table(cells: dict[str, Any]) -> str:
    """Accuracy of the finished models, in Markdown."""
    lines = [
        "| run | learning rate | 95 % | 98 % | pruning, s | training, s |", "| --- | --- | --- | --- | --- | --- |"
    ]  # fmt: skip
    for name in (name for name in RUNS if name in cells):
        rows = cells[name]["steps"]
        ends = " | ".join(f"{row['finished']:.2f}" for row in rows if "finished" in row)
        spent = [round(sum(row[key] for row in rows)) for key in ("pruning_seconds", "training_seconds")]
        lines.append(f"| {name} | {cells[name]['learning_rate']:g} | {ends} | {spent[0]} | {spent[1]} |")
    return "\n".join(lines)


def plot(folder: Path = Path(__file__).parent.parent / "docs" / "images") -> None:
    import json

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = json.loads((RESULTS / "gradual_resnet20.json").read_text())["cells"]
    print(f"dense {cells['dense']:.2f}\n{table(cells)}")
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    colours = dict(zip(RUNS, ("C0", "C1"), strict=True))
    for name, colour in ((name, colours[name]) for name in RUNS if name in cells):
        rows = cells[name]["steps"]
        steps = [i + offset for i in range(len(rows)) for offset in (0, 0.7)]
        values = [row[key] for row in rows for key in ("pruned", "trained")]
        axis.plot(steps, values, colour, label=f"{name}: after pruning, after training")
        ends = [(i + 0.7, row["finished"]) for i, row in enumerate(rows) if "finished" in row]
        axis.plot(
            *zip(*ends, strict=True),
            colour,
            marker="*",
            linestyle="",
            markersize=11,
            label=f"{name}: trained to an end",
        )
    axis.axhline(cells["dense"], color="0.6", linewidth=1, linestyle="--")
    axis.set_xticks(range(len(SCHEDULE)), [f"{100 * sparsity:.1f} %" for sparsity in SCHEDULE])
    axis.set(xlabel="sparsity", ylabel="test accuracy, %", title="ResNet20 on CIFAR-10, pruned gradually")
    axis.legend(fontsize=8)
    figure.savefig(folder / "gradual.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plot"])
    parser.add_argument("--only", choices=list(RUNS), help="one of the two, so that both can run side by side")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.only)
    else:
        plot()


if __name__ == "__main__":
    main()

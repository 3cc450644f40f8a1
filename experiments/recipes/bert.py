"""Tables of BERT: Adam against M-FAC on tasks of GLUE, five seeds, mean and deviation.

The learning rate falls in a straight line to zero, as in the Hugging Face examples. M-FAC is in the units of the sum
over the window: lr 0.1 and damping 1e-3 are the paper's 1e-4 and 1e-6 with 1,024 gradients, and serve shorter windows.
Both have the same search: three learning rates, one seed (full: Adam's is 2e-5 in the paper, M-FAC's 1e-4).

Small: MiniLM-L3 (a small pretrained BERT, its embeddings frozen, 5.5 million weights to train) on MRPC, RTE, STS-B and
SST-2; sentences and pairs of at most 48 tokens, 40 steps of 16 examples, a window of 64 gradients, up to 300 examples
of the development sets: 19 minutes on one core. Its authors tuned it on paraphrases: not to be compared with the
paper's rows. Full: 3 passes (MRPC: 5) of batches of 32, 128 tokens, a window of 1,024 gradients (256 with MiniLM, or as
many as there are steps): BERT-tiny and -mini from --checkpoint FOLDER with the sub-folders `tiny` and `mini` as Hugging
Face saves them; without it MiniLM.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfac
from experiments import drawing
from experiments.data import data_root
from experiments.models.bert import SIZES as BERTS
from experiments.models.bert import bert_classifier
from experiments.recipe import Recipe, Request, Results
from experiments.training import Training, last_loss, linear
from mfac.datasets.sentences import COLUMNS
from mfac.gradients import model_loss
from mfac.tasks.correlations import pearson, spearman
from mfac.tasks.minilm import minilm_classifier, tokenizer
from mfac.tasks.sentence_batches import SentenceBatches, Tokens, encode

RATES = {"Adam": (2e-5, 1e-4, 3e-4), "M-FAC": (0.03, 0.1, 0.3)}
DAMPING = 1e-3
EPOCHS = {"mrpc": 5, "rte": 3, "stsb": 3, "sst2": 3}
RUNS = data_root().parent / "runs"


@dataclass(frozen=True)
class Settings:
    """How much of every task."""

    tasks: tuple[str, ...]
    seeds: int
    window: int
    batch_size: int
    longest: int
    steps: int | None = None  # None: EPOCHS
    search_steps: int | None = None
    dev: int | None = None
    train: int | None = None
    rates: int = 3


SIZES = {
    "full": Settings(("mrpc", "rte", "stsb", "sst2"), 5, 1024, 32, 128),
    "small": Settings(("mrpc", "rte", "stsb", "sst2"), 5, 64, 16, 48, 40, 24, dev=300, train=4000),
    "smoke": Settings(("mrpc", "stsb"), 1, 2, 2, 64, 2, 1, dev=4, train=8, rates=1),
}


def run(request: Request) -> None:
    results, settings = Results("bert", request), SIZES[request.size]
    results.settings(**vars(settings), damping=DAMPING, learning_rates=RATES)
    for network, make_model in networks(request).items():
        for task in settings.tasks:
            for optimizer in RATES:
                if request.wants(f"{network}, {task}, {optimizer}"):
                    compete(results, network, task, optimizer, make_model, settings)


def networks(request: Request) -> dict[str, Callable[[int], nn.Module]]:
    """{name: labels -> a pretrained model}."""
    if request.size != "full" or request.checkpoint is None:
        return {"MiniLM-L3": minilm_classifier}
    folder = request.checkpoint
    return {f"BERT-{name}": lambda labels, name=name: bert_classifier(name, labels, folder / name) for name in BERTS}


def compete(
    results: Results, network: str, task: str, optimizer: str, make_model: Callable[[int], nn.Module],
    settings: Settings,
) -> None:  # fmt: skip
    """The search with seed 0, then the seeds with the learning rate of the lowest training loss."""
    row = f"{network}, {task}, {optimizer}"
    rates = RATES[optimizer][: settings.rates]
    for lr in rates:
        key = f"search, {row}, lr {lr:g}"
        results.cell(
            key, lambda a=(key, lr, optimizer, task, 0): tuned(*a, make_model, settings, settings.search_steps)
        )
    best = min(rates, key=lambda lr: last_loss(results.cells[f"search, {row}, lr {lr:g}"]))
    for seed in range(1, settings.seeds + 1):
        key = f"run, {row}, seed {seed}"
        results.cell(key, lambda a=(key, best, optimizer, task, seed): tuned(*a, make_model, settings, settings.steps))


def tuned(
    key: str, lr: float, optimizer: str, task: str, seed: int, make_model: Callable[[int], nn.Module],
    settings: Settings, steps: int | None,
) -> dict[str, Any]:  # fmt: skip
    """One run, and the measures on the development set at its end."""
    torch.manual_seed(seed)
    classes = COLUMNS[task].classes
    model = make_model(len(classes) or 1)
    train, dev = (examples(task, split, settings.longest, settings.steps is None) for split in ("train", "dev"))
    batches = SentenceBatches(
        train[: settings.train], settings.batch_size, shuffle=True, regression=not classes,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    held_out = SentenceBatches(dev[: settings.dev], 50, regression=not classes)
    whole = EPOCHS[task] * len(batches)
    steps = whole if steps is None else steps
    window = min(settings.window, whole)
    training = Training(
        model, make_optimizer(optimizer, model, lr, window), batches, steps, linear, loss_fn=model_loss,
        test=lambda model: measures(model, held_out, bool(classes)), test_every=steps,
        keep=RUNS / f"bert_{key}.pt".replace(" ", "_").replace(",", "") if settings.steps is None else None,
    )  # fmt: skip
    return training.run() | {"lr": lr, "window": window if optimizer == "M-FAC" else None}


def make_optimizer(name: str, model: nn.Module, lr: float, window: int) -> torch.optim.Optimizer:
    """Of the weights that are not frozen."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if name == "Adam":
        return torch.optim.Adam([p for _, p in trained], lr)
    return mfac.MFAC(trained, lr, window, DAMPING, normalize="sum")


@cache
def examples(task: str, split: str, longest: int, cut: bool) -> list[Tokens]:
    """Read and cut into tokens once."""
    return encode(task, split, tokenizer(), longest, cut)


@torch.no_grad()
def measures(model: nn.Module, batches: SentenceBatches, classes: bool) -> dict[str, float]:
    """Accuracy and F1 in per cent; Pearson's and Spearman's correlations for numbers."""
    pairs = [(model(**batch).logits, batch["labels"]) for batch in batches]
    outputs, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    if not classes:
        return {"pearson": 100 * pearson(outputs, labels), "spearman": 100 * spearman(outputs, labels)}
    guesses = outputs.argmax(1)
    both = float(((guesses == 1) & (labels == 1)).sum())
    f1 = 2 * both / max(1.0, float((guesses == 1).sum() + (labels == 1).sum()))
    return {"accuracy": 100 * float((guesses == labels).double().mean()), "f1": 100 * f1}


def table(cells: dict[str, Any]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """{network and task: {optimizer, measure: (mean, deviation, runs)}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, cell in cells.items():
        if key.startswith("run, ") and cell["finished"]:
            network, task, optimizer, _ = key.removeprefix("run, ").split(", ")
            for measure, value in cell["tests"][-1].items():
                if measure != "step":
                    found.setdefault(f"{network}, {task}", {}).setdefault(f"{optimizer}, {measure}", []).append(value)
    return {
        row: {
            name: (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0, len(v)) for name, v in part.items()
        }
        for row, part in found.items()
    }


def plot(request: Request) -> Path:
    results = Results("bert", request)
    figures = table(results.cells)
    for row, part in figures.items():
        told = ", ".join(f"{name} {mean:.2f} ± {deviation:.2f} ({n})" for name, (mean, deviation, n) in part.items())
        print(f"{row}: {told}")
    groups = {
        row.replace(", ", "\n"): {name.split(",")[0]: mean for name, (mean, _, _) in part.items()
                                  if name.endswith(("accuracy", "pearson"))}
        for row, part in figures.items()
    }  # fmt: skip
    return drawing.bars(
        results.picture(), groups, y="accuracy (STS-B: Pearson's correlation), %",
        title="GLUE, development sets, mean over seeds",
    )  # fmt: skip


RECIPE = Recipe("bert", "BERT on GLUE, Adam against M-FAC (tables of BERT)", run, plot, minutes=19)

"""Tables of BERT: Adam against M-FAC and FullMatrixAdam on tasks of GLUE, five seeds, mean and standard deviation.

The learning rate falls linearly to zero, as in the Hugging Face examples. With M-FAC's normalize="sum", lr 0.1 and
damping 1e-3 are the paper's 1e-4 and 1e-6 at 1,024 gradients, and work for shorter windows too. All have the same
search: three learning rates, the paper's among them, one seed; FullMatrixAdam has those of Adam.

MiniLM-L3, a small pretrained sentence encoder (embeddings frozen, 5.3 million weights to train), on MRPC, RTE, STS-B
and SST-2: 64 steps of 16 examples of at most 64 tokens, a window of 48 gradients in bfloat16, up to 300 examples of the
development sets: 70 minutes of one core, half of that on two with --jobs 2. The two sentences of a pair are encoded
separately, as this encoder is meant to be used (its authors tuned it on paraphrases), so only the difference between
the optimizers can be compared with the paper.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfac
from experiments import drawing
from experiments.correlations import pearson, spearman
from experiments.datasets.sentences import COLUMNS, SentenceBatches, Tokens, encode
from experiments.models.minilm import tokenizer
from experiments.models.sentence_classifier import minilm_sentences
from experiments.recipe import Recipe, Results
from experiments.tasks.glue import predictions
from experiments.training import Training, last_loss, linear
from mfac.gradients import model_loss
from mfac.windows.storage import Window

ORTHOGONALIZED = "FullMatrixAdam orthogonalized"
ADAM_RATES = (2e-5, 1e-4, 3e-4)
RATES = {"Adam": ADAM_RATES, "M-FAC": (0.1, 0.3, 1.0), "FullMatrixAdam": ADAM_RATES, ORTHOGONALIZED: ADAM_RATES}
DAMPING = 1e-3
NETWORK = "MiniLM-L3"


@dataclass(frozen=True)
class Settings:
    tasks: tuple[str, ...] = ("mrpc", "rte", "stsb", "sst2")
    seeds: int = 5
    window: int = 48
    batch_size: int = 16
    longest: int = 64  # tokens; longer examples are left out, so that all steps are short
    steps: int = 64
    search_steps: int = 32
    dev: int = 300
    train: int = 4000
    rates: int = 3
    storage: Window = torch.bfloat16  # of the window's rows


Maker = Callable[[str], nn.Module]  # of a task


def measure(results: Results, settings: Settings) -> None:
    for task in settings.tasks:
        if results.wants(f"{NETWORK}, {task}"):
            torch.manual_seed(0)  # of the classifier, which is random
            results.cell(f"before, {NETWORK}, {task}", lambda t=task: measured(minilm_sentences(t), t, settings))
        for optimizer in RATES:
            if results.wants(f"{NETWORK}, {task}, {optimizer}"):
                compete(results, task, optimizer, settings)


def compete(results: Results, task: str, optimizer: str, settings: Settings) -> None:
    """The search with seed 0, then all seeds with the learning rate of the lowest training loss."""
    row, rates = f"{NETWORK}, {task}, {optimizer}", RATES[optimizer][: settings.rates]
    run = partial(tuned, optimizer, task=task, make_model=minilm_sentences)
    short = replace(settings, steps=settings.search_steps)
    found = {lr: results.cell(f"search, {row}, lr {lr:g}", partial(run, lr, seed=0, settings=short)) for lr in rates}
    best = min(rates, key=lambda lr: last_loss(found[lr]))
    for seed in range(1, settings.seeds + 1):
        results.cell(f"run, {row}, seed {seed}", partial(run, best, seed=seed, settings=settings))


def tuned(optimizer: str, lr: float, *, task: str, seed: int, make_model: Maker, settings: Settings) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = make_model(task)
    batches = SentenceBatches(
        examples(task, "train", settings.longest)[: settings.train], settings.batch_size, shuffle=True,
        regression=not COLUMNS[task].classes, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    training = Training(
        model, make_optimizer(optimizer, model, lr, settings), batches, settings.steps, linear, loss_fn=model_loss,
        test=lambda model: measured(model, task, settings), test_every=settings.steps,
    )  # fmt: skip
    return training.run() | {"lr": lr, "window": None if optimizer == "Adam" else settings.window}


def make_optimizer(name: str, model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if name == "Adam":
        return torch.optim.Adam([p for _, p in trained], lr)
    if name == "SGD":
        return torch.optim.SGD([p for _, p in trained], lr, momentum=0.9)
    if name != "M-FAC":
        orthogonalize = name == ORTHOGONALIZED
        return mfac.FullMatrixAdam(trained, lr, settings.window, orthogonalize=orthogonalize, window=settings.storage)
    return mfac.MFAC(trained, lr, settings.window, DAMPING, normalize="sum", window=settings.storage)


@cache
def examples(task: str, split: str, longest: int) -> list[Tokens]:
    return encode(task, split, tokenizer(), longest, cut=False)


def measured(model: nn.Module, task: str, settings: Settings) -> dict[str, float]:
    """Accuracy and F1 on the development set in per cent; Pearson's and Spearman's correlations for numbers."""
    classes = COLUMNS[task].classes
    batches = SentenceBatches(examples(task, "dev", settings.longest)[: settings.dev], 50, regression=not classes)
    outputs, labels = predictions(model, batches)
    if not classes:
        return {"pearson": 100 * pearson(outputs, labels), "spearman": 100 * spearman(outputs, labels)}
    guesses = outputs.argmax(1)
    both = float(((guesses == 1) & (labels == 1)).sum())
    f1 = 2 * both / max(1.0, float((guesses == 1).sum() + (labels == 1).sum()))
    return {"accuracy": 100 * float((guesses == labels).double().mean()), "f1": 100 * f1}


def table(cells: dict[str, Any]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """{network and task: {optimizer, measure: (mean, standard deviation, runs)}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, cell in cells.items():
        if key.startswith("run, ") and cell["finished"]:
            network, task, optimizer, _ = key.removeprefix("run, ").split(", ")
            for measure, value in cell["tests"][-1].items():
                if measure != "step":
                    found.setdefault(f"{network}, {task}", {}).setdefault(f"{optimizer}, {measure}", []).append(value)
    told = lambda v: (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else 0.0, len(v))  # noqa: E731
    return {row: {name: told(values) for name, values in part.items()} for row, part in found.items()}


def draw(results: Results, settings: Settings) -> Path:
    figures = table(results.cells)
    for row, part in figures.items():
        print(f"{row}:", *(f"{name} {mean:.2f} ± {std:.2f} ({n})," for name, (mean, std, n) in part.items()))
    groups = {
        row.replace(", ", "\n"): {name.split(",")[0]: mean for name, (mean, _, _) in part.items()
                                  if name.endswith(("accuracy", "pearson"))}
        for row, part in figures.items()
    }  # fmt: skip
    title = "GLUE, development sets, mean over seeds"
    return drawing.bars(results.picture, groups, y="accuracy (STS-B: Pearson's correlation), %", title=title)


RECIPE = Recipe(
    "bert", "sentences of GLUE, Adam against M-FAC and FullMatrixAdam (tables of BERT)", measure, draw, Settings(),
    Settings(("mrpc", "stsb"), 1, 2, 2, 64, 2, 1, dev=4, train=8, rates=1), minutes=38,
)  # fmt: skip

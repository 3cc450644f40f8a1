"""Tables of BERT: Adam against M-FAC on tasks of GLUE, five seeds, mean and standard deviation.

The learning rate falls linearly to zero, as in the Hugging Face examples. With M-FAC's normalize="sum", lr 0.1 and
damping 1e-3 are the paper's 1e-4 and 1e-6 at 1,024 gradients, and work for shorter windows too. Both have the same
search: three learning rates, the paper's among them, one seed.

Small: MiniLM-L3, a small pretrained sentence encoder (embeddings frozen, 5.3 million weights to train), on MRPC, RTE,
STS-B and SST-2: 64 steps of 16 examples of at most 64 tokens, a window of 48 gradients in bfloat16, up to 300 examples
of the development sets: 35 minutes of one core, half of that on two with --jobs 2. The two sentences of a pair are
encoded separately, as this encoder is meant to be used (its authors tuned it on paraphrases), so only the difference
between the optimizers can be compared with the paper. Full: 3 passes (MRPC: 5) of batches of 32, 128 tokens, a window
of 1,024 gradients, or as many as there are steps: BERT-tiny and -mini from --checkpoint FOLDER with the sub-folders
`tiny` and `mini` as Hugging Face saves them; without it MiniLM (a window of 22 GB).
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mfac
from experiments import drawing
from experiments.correlations import pearson, spearman
from experiments.datasets.sentence_batches import SentenceBatches, Tokens, encode
from experiments.datasets.sentences import COLUMNS
from experiments.models.bert import SIZES as BERTS
from experiments.models.bert import bert_classifier
from experiments.models.minilm import tokenizer
from experiments.models.sentence_classifier import minilm_sentences
from experiments.recipe import Recipe, Request, Results
from experiments.training import Training, file_of, last_loss, linear
from mfac.gradients import model_loss
from mfac.windows.storage import Window

RATES = {"Adam": (2e-5, 1e-4, 3e-4), "M-FAC": (0.1, 0.3, 1.0)}
DAMPING = 1e-3
EPOCHS = {"mrpc": 5, "rte": 3, "stsb": 3, "sst2": 3}


@dataclass(frozen=True)
class Settings:
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
    storage: Window = torch.float32  # of the window's rows


SIZES = {
    "full": Settings(tuple(EPOCHS), 5, 1024, 32, 128),
    "small": Settings(tuple(EPOCHS), 5, 48, 16, 64, 64, 32, dev=300, train=4000, storage=torch.bfloat16),
    "smoke": Settings(("mrpc", "stsb"), 1, 2, 2, 64, 2, 1, dev=4, train=8, rates=1),
}
Maker = Callable[[str], nn.Module]


def run(request: Request) -> None:
    results, settings = Results("bert", request), SIZES[request.size]
    results.settings(**vars(settings) | {"storage": str(settings.storage)}, damping=DAMPING, learning_rates=RATES)
    for network, make_model in networks(request).items():
        for task in settings.tasks:
            if request.wants(f"{network}, {task}"):
                torch.manual_seed(0)  # of the classifier, which is random
                key = f"before, {network}, {task}"
                results.cell(key, lambda m=make_model, t=task: measured(m(t).eval(), t, settings))
            for optimizer in RATES:
                if request.wants(f"{network}, {task}, {optimizer}"):
                    compete(results, network, task, optimizer, make_model, settings)


def networks(request: Request) -> dict[str, Maker]:
    """{name: task -> a pretrained model}."""
    if request.size != "full" or request.checkpoint is None:
        return {"MiniLM-L3": lambda task: minilm_sentences(num_outputs(task), COLUMNS[task].second is not None)}
    folder = request.checkpoint
    make = lambda name, task: bert_classifier(name, num_outputs(task), folder / name)  # noqa: E731
    return {f"BERT-{name}": partial(make, name) for name in BERTS}


def num_outputs(task: str) -> int:
    """Classes, or 1 for a number."""
    return len(COLUMNS[task].classes) or 1


def compete(results: Results, network: str, task: str, optimizer: str, make_model: Maker,
            settings: Settings) -> None:  # fmt: skip
    """The search with seed 0, then all seeds with the learning rate of the lowest training loss."""
    row, rates = f"{network}, {task}, {optimizer}", RATES[optimizer][: settings.rates]
    for lr in rates:
        key = f"search, {row}, lr {lr:g}"
        arguments = (key, lr, optimizer, task, 0, make_model, settings, settings.search_steps)
        results.cell(key, lambda a=arguments: tuned(*a))
    best = min(rates, key=lambda lr: last_loss(results.cells[f"search, {row}, lr {lr:g}"]))
    for seed in range(1, settings.seeds + 1):
        key = f"run, {row}, seed {seed}"
        arguments = (key, best, optimizer, task, seed, make_model, settings, settings.steps)
        results.cell(key, lambda a=arguments: tuned(*a))


def tuned(key: str, lr: float, optimizer: str, task: str, seed: int, make_model: Maker, settings: Settings,
          steps: int | None) -> dict[str, Any]:  # fmt: skip
    torch.manual_seed(seed)
    model = make_model(task)
    batches = SentenceBatches(
        examples(task, "train", settings)[: settings.train], settings.batch_size, shuffle=True,
        regression=not COLUMNS[task].classes, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    whole = EPOCHS[task] * len(batches)
    steps, window = whole if steps is None else steps, min(settings.window, whole)
    training = Training(
        model, make_optimizer(optimizer, model, lr, window, settings.storage), batches, steps, linear,
        loss_fn=model_loss, test=lambda model: measured(model, task, settings), test_every=steps,
        keep=file_of(f"bert_{key}") if settings.steps is None else None,
    )  # fmt: skip
    return training.run() | {"lr": lr, "window": window if optimizer == "M-FAC" else None}


def make_optimizer(name: str, model: nn.Module, lr: float, window: int, storage: Window) -> torch.optim.Optimizer:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if name == "Adam":
        return torch.optim.Adam([p for _, p in trained], lr)
    if name == "SGD":
        return torch.optim.SGD([p for _, p in trained], lr, momentum=0.9)
    return mfac.MFAC(trained, lr, window, DAMPING, normalize="sum", window=storage)


@cache
def examples(task: str, split: str, settings: Settings) -> list[Tokens]:
    """Small sizes leave long examples out, so that all steps are short."""
    return encode(task, split, tokenizer(), settings.longest, cut=settings.steps is None)


@torch.no_grad()
def measured(model: nn.Module, task: str, settings: Settings) -> dict[str, float]:
    """Accuracy and F1 on the development set in per cent; Pearson's and Spearman's correlations for numbers."""
    classes = COLUMNS[task].classes
    batches = SentenceBatches(examples(task, "dev", settings)[: settings.dev], 50, regression=not classes)
    pairs = [(model(**batch).logits, batch["labels"]) for batch in batches]
    outputs, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
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


def plot(request: Request) -> Path:
    results = Results("bert", request)
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


RECIPE = Recipe("bert", "BERT on GLUE, Adam against M-FAC (tables of BERT)", run, plot, minutes=19)

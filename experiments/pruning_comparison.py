"""One-shot pruning at the same calibration data: `mfac.prune` as it is against its rivals, no training afterwards.

    python -m experiments.pruning_comparison SUBJECT --seeds 3  # its choices: --help
    python -m experiments.pruning_comparison stories260K --only "mfac.prune" --only K-FAC
    python -m experiments.pruning_comparison resnet20 --refit      # each followed by `mfac.refit` to the dense outputs
    python -m experiments.pruning_comparison plot

Every method has the same 64 calibration batches, the same number of recomputations to each sparsity, and batch-norm
statistics re-estimated on the same batches before each test (but for ResNet50). `mfac.prune` has its defaults, and goes
to each sparsity from the dense model, to whose outputs it refits; the others go from one sparsity to the next. Settings
of the rivals (damping, scope) are chosen by the loss on other training data, at one sparsity and the first seed, and
saved with it. Seconds are processor time of one thread, without tests. Cells are saved one by one, and a command
resumes.
"""

import argparse
import copy
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import mfac
from experiments import drawing
from experiments.baselines.pruning import prune
from experiments.baselines.sparse_gpt import sparse_gpt
from experiments.data import HALVES, IMAGENET, ImageBatches, cifar10, make_test
from experiments.datasets.images import crop_and_flip
from experiments.ledger import IMAGES, Ledger
from experiments.models.resnet import akamaster_resnet20, mfac_resnet20
from experiments.models.resnet50 import imagenet_resnet50, imagenette, top_accuracies
from experiments.models.smollm2 import smollm2, wikitext_pieces
from experiments.models.stories import perplexity, stories_model, story_batches, story_pieces
from mfac.gradients.losses import LossFn
from mfac.pruning.batch_norm import recalibrate

BATCHES = 64
CROSS_ENTROPY = mfac.criterion_loss(nn.CrossEntropyLoss())
Batches = list[Any]


@dataclass(frozen=True)
class Subject:
    """A model and its data: `calibration(seed)` is 64 batches, `held_out` other training batches."""

    model: Callable[[], nn.Module]
    loss_fn: LossFn
    calibration: Callable[[int], Batches]
    held_out: Callable[[], Batches]
    test: Callable[[nn.Module], dict[str, float]]
    stages: dict[float, int]  # {sparsity: recomputations that lead to it}
    searched: float  # the sparsity at which settings are chosen
    pattern: bool = False  # 2:4 too
    methods: tuple[str, ...] = ()
    scale: float = 1.0  # of the dampings of squared gradients: the loss of a token is a mean over tokens
    ours: tuple[tuple[str, Any], ...] = ()
    targets: str | None = None
    recalibrated: bool = True  # else batch-norm statistics are kept


def _images(normalisation: Any, seed: int) -> Batches:
    """1,024 augmented training images in batches of 16; the last 2,000 are held out."""
    images, labels = cifar10("train")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(images) - 2000, generator=generator)[: 16 * BATCHES]
    inputs = normalisation(crop_and_flip(images[chosen], generator))
    return list(zip(inputs.split(16), labels[chosen].split(16), strict=True))


def _cifar(model: Callable[[], nn.Module], normalisation: Any) -> Subject:
    def held_out() -> Batches:
        images, labels = cifar10("train")
        return list(ImageBatches(images[-2000:], labels[-2000:], 250, normalisation))

    return Subject(model, CROSS_ENTROPY, partial(_images, normalisation), held_out, make_test(normalisation),
                   {0.7: 3, 0.8: 2, 0.9: 3, 0.95: 2}, 0.9, methods=IMAGE_METHODS)  # fmt: skip


def _stories(name: str, length: int, tested: int, stages: dict[float, int], pattern: bool) -> Subject:
    """128 pieces in batches of 2; the last 64 training pieces are held out."""
    pieces = partial(story_pieces, name, length=length)

    def calibration(seed: int) -> Batches:
        train = pieces("train")[:-64]
        chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[: 2 * BATCHES]
        return story_batches(train[chosen], 2)

    def test(model: nn.Module) -> dict[str, float]:
        valid = pieces("valid")[:tested]
        return {"perplexity": perplexity(model, story_batches(valid[: len(valid) // 8 * 8], 8))}

    return Subject(partial(stories_model, name), mfac.model_loss, calibration,
                   lambda: story_batches(pieces("train")[-64:], 8), test, stages, 0.6, pattern,
                   LANGUAGE_METHODS, 0.01)  # fmt: skip


def _resnet50() -> Subject:
    """512 pictures of ten classes in batches of 8, among 1,000 classes; the last 64 are held out.

    Batch-norm statistics of ten classes alone are not those of the model, so they are kept.
    """
    images, labels = imagenette("train")

    def batches(chosen: Any, size: int) -> Batches:
        return list(zip(images[chosen].split(size), labels[chosen].split(size), strict=True))

    def calibration(seed: int) -> Batches:
        order = torch.randperm(len(images) - 64, generator=torch.Generator().manual_seed(seed))
        return batches(order[: 8 * BATCHES], 8)

    return Subject(imagenet_resnet50, CROSS_ENTROPY, calibration, lambda: batches(slice(-64, None), 16), top_accuracies,
                   {0.5: 1, 0.6: 1, 0.7: 1, 0.8: 1}, 0.7, methods=("magnitude", "M-FAC (paper)", OURS),
                   ours=(("memory", "6GB"), ("recalibrate", False)), recalibrated=False)  # fmt: skip


def _smollm2() -> Subject:
    """The last ten of 30 layers, by 128 pieces of the validation text, tested on 96 of the test text."""

    def pieces(chosen: Any, size: int) -> Batches:
        return story_batches(wikitext_pieces("valid", 256)[chosen], size)

    def calibration(seed: int) -> Batches:
        others = len(wikitext_pieces("valid", 256)) - 64
        return pieces(torch.randperm(others, generator=torch.Generator().manual_seed(seed))[: 2 * BATCHES], 2)

    def test(model: nn.Module) -> dict[str, float]:
        return {"perplexity": perplexity(model, story_batches(wikitext_pieces("test", 256)[:96], 8))}

    return Subject(smollm2, mfac.model_loss, calibration, lambda: pieces(slice(-64, None), 8), test, {0.5: 1}, 0.5,
                   methods=(NOT_REFITTED, OURS, "Wanda", "magnitude"), ours=(("memory", "6GB"),),
                   targets=r"re:.*layers\.2\d\..*proj.weight")  # fmt: skip


OWN = OURS, NOT_REFITTED, WITHOUT_PRIOR = "mfac.prune", "mfac.prune, refit=False", 'mfac.prune, update="joint"'
REFITTED = " + mfac.refit"
AFRESH = (OURS, "SparseGPT")  # each sparsity from the dense model
IMAGE_METHODS = (*OWN, "K-FAC", "magnitude", "M-FAC (paper)", "L-OBS", "WoodFisher", "Wanda")
LANGUAGE_METHODS = (*OWN, "K-FAC", "SparseGPT", "Wanda", "magnitude", "L-OBS", "M-FAC (paper)")
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet20": lambda: _cifar(mfac_resnet20, HALVES),
    "akamaster": lambda: _cifar(akamaster_resnet20, IMAGENET),
    "stories260K": lambda: _stories("stories260K", 256, 304, {0.5: 4, 0.6: 2, 0.7: 2}, pattern=True),
    "stories15M": lambda: _stories("stories15M", 128, 304, {0.5: 2, 0.6: 1, 0.7: 1}, pattern=False),
    "resnet50": _resnet50,
    "smollm2": _smollm2,
}
SCOPES = [{"scope": "global"}, {"scope": "layer"}]
PAPER = {"fisher": "empirical", "num_grads": BATCHES, "block_size": 128}
# {name: the settings to choose from}
METHODS: dict[str, list[dict[str, Any]]] = {
    OURS: [{}],
    NOT_REFITTED: [{"refit": False}],
    WITHOUT_PRIOR: [{"update": "joint"}],
    "magnitude": [{"method": "magnitude", **scope} for scope in SCOPES],
    "Wanda": [{"method": name, "scope": "layer"} for name in ("wanda", "wanda by row")],
    "L-OBS": [{"method": "lobs", "scope": "layer", "damping": damping} for damping in (1e-4, 1e-3, 1e-2)],
    "WoodFisher": [PAPER | {"method": "woodfisher", "update": "obs", "damping": damping} for damping in (1e-5, 1e-4)],
    "M-FAC (paper)": [PAPER | {"method": "mfac", "damping": damping} for damping in (1e-6, 1e-5, 1e-4)],
    "K-FAC": [{"method": "kfac", "damping": damping} for damping in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)],
    "SparseGPT": [{"damping": damping} for damping in (0.01, 0.1)],
}
SCALED = ("WoodFisher", "M-FAC (paper)", "K-FAC")


def pruned(
    subject: Subject, name: str, model: nn.Module, batches: Batches, sparsity: float | None, recomputations: int,
    masks: dict[str, Tensor] | None, settings: dict[str, Any], seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Prunes the model further; the masks."""
    pattern = {"pattern": "2:4"} if sparsity is None else {}
    if name == "SparseGPT":
        return sparse_gpt(model, subject.loss_fn, batches, sparsity, targets=subject.targets, **pattern, **settings)
    shared = {"recomputations": recomputations, "seed": seed, "progress": False, "targets": subject.targets, **pattern}
    if name in OWN:
        settings = dict(subject.ours) | settings
        return mfac.prune(model, subject.loss_fn, batches, sparsity, masks=masks, **shared, **settings).masks
    shared["recalibrate"] = False
    if settings["method"] != "magnitude":
        shared |= {"num_grads": BATCHES, "loss_batches": 1}
    return prune(model, subject.loss_fn, batches, sparsity, masks=masks, **shared | settings).masks


def tested(subject: Subject, model: nn.Module, batches: Batches, test: Callable[[nn.Module], Any]) -> Any:
    """The test of a copy with batch-norm statistics of the calibration batches, 128 samples at a time."""
    other = copy.deepcopy(model)
    if subject.recalibrated and any(isinstance(module, _BatchNorm) for module in other.modules()):
        images = torch.cat([batch[0] for batch in batches])
        recalibrate(other, [(part,) for part in images.split(128)])
    return test(other.eval())


def chosen(subject: Subject, name: str, ledger: Ledger) -> dict[str, Any]:
    """The settings with the lowest loss on held-out training data after pruning to `searched`."""
    candidates = METHODS[name]
    if name in SCALED:
        candidates = [settings | {"damping": settings["damping"] * subject.scale} for settings in candidates]
    if len(candidates) == 1:
        return candidates[0]

    def search() -> dict[str, Any]:
        batches, held_out, losses = subject.calibration(0), subject.held_out(), []
        for settings in candidates:
            model = subject.model()
            try:
                pruned(subject, name, model, batches, subject.searched, 2, None, settings, 0)
                losses.append(tested(subject, model, batches, lambda m: loss(m, subject.loss_fn, held_out)))
            except torch.linalg.LinAlgError:
                losses.append(float("inf"))
            print(f"  {settings}: {losses[-1]:.4f}", flush=True)
        best = candidates[losses.index(min(losses))]
        return {"best": best, "losses": [[str(s), value] for s, value in zip(candidates, losses, strict=True)]}

    return ledger.cell(f"{name}, settings", search)["best"]


@torch.no_grad()
def loss(model: nn.Module, loss_fn: LossFn, batches: Batches) -> float:
    return float(torch.stack([loss_fn(model, batch) for batch in batches]).mean())


def row(
    subject: Subject, name: str, settings: dict[str, Any], seed: int, two_four: bool, refitted: bool,
    note: Callable[[Any], None],
) -> dict[str, Any]:  # fmt: skip
    """{sparsity: its cell}: each stage starts from the one before, or from the dense model; each is noted at its end.

    A copy is refitted for the test.
    """
    model, batches, masks, cells = subject.model(), subject.calibration(seed), None, {}
    stages: dict[float | None, int] = {None: 4} if two_four else dict(subject.stages)
    steps = 0
    for sparsity, recomputations in stages.items():
        steps = steps * (name in AFRESH) + recomputations
        if name in AFRESH:
            model, masks = subject.model(), None
        start = time.process_time()
        masks = pruned(subject, name, model, batches, sparsity, steps, masks, settings, seed)
        seconds = round(time.process_time() - start, 1)
        kept = sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
        other = copy.deepcopy(model)
        if refitted:
            mfac.refit(other, subject.model(), subject.loss_fn, batches, masks)
        cell = tested(subject, other, batches, subject.test)
        cell |= {"sparsity": round(1 - kept, 4), "seconds": seconds,
                 "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}  # fmt: skip
        cells["2:4" if sparsity is None else f"{sparsity:.0%}"] = cell
        print(f"  {name} {sparsity}: {cell}", flush=True)
        note({"settings": settings, "cells": cells, "partial": True})
    return {"settings": settings, "cells": cells}


def compare(subject_name: str, seeds: list[int], only: list[str], refitted: bool) -> None:
    subject = SUBJECTS[subject_name]()
    command = f"python -m experiments.pruning_comparison {subject_name}"
    ledger = Ledger(f"pruning_{subject_name}", command)
    ledger.cell("dense", lambda: subject.test(subject.model()))
    for seed in seeds:
        for name in only or subject.methods:
            settings = chosen(subject, name, ledger)
            for two_four in (False, True) if subject.pattern else (False,):
                key = f"{name}{REFITTED * refitted}, seed {seed}{', 2:4' if two_four else ''}"
                note = partial(ledger.note, key)
                ledger.cell(key, partial(row, subject, name, settings, seed, two_four, refitted, note))


def means(cells: dict[str, Any], name: str) -> dict[str, tuple[float, float, int]]:
    """{sparsity: (measure, seconds so far, seeds)} of a method, means over the seeds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for key, row in cells.items():
        seconds = 0.0
        if key.startswith(f"{name}, seed"):
            for sparsity, cell in row["cells"].items():
                seconds = cell["seconds"] + (0.0 if name in AFRESH else seconds)
                found.setdefault(sparsity, []).append((next(iter(cell.values())), seconds))
    return {key: (*(sum(column) / len(pairs) for column in zip(*pairs, strict=True)), len(pairs))
            for key, pairs in found.items()}  # fmt: skip


def plot() -> None:
    """Every model that was measured: a table in Markdown, and a panel of the measure against sparsity."""
    found = {name: Ledger(f"pruning_{name}", "").cells for name in SUBJECTS}
    found = {name: cells for name, cells in found.items() if len(cells) > 1}
    figure, axes = drawing.panels(-(-len(found) // 3), 3, (15, 4.5 * -(-len(found) // 3)))
    for axis, (title, cells) in zip(axes.flat, found.items(), strict=False):
        names = [*METHODS, *(name + REFITTED for name in METHODS)]
        rows = {name: row for name in names if (row := means(cells, name))}
        columns = list(dict.fromkeys(key for row in rows.values() for key in row))
        print(f"\n| {title} | {' | '.join(columns)} | seconds | seeds |\n| {'--- | ' * (len(columns) + 3)}")
        for name, row in rows.items():
            values = [f"{row[key][0]:.4g}" if key in row else "" for key in columns]
            last = [row[key] for key in columns if key in row and key != "2:4"][-1]
            print(f"| {name} | {' | '.join(values)} | {last[1]:.0f} | {last[2]} |")
            line = drawing.curve(
                (float(key.rstrip("%")), row[key][0]) for key in columns if key in row and key != "2:4"
            )
            axis.plot(*line, label=name, **drawing.style(names.index(name)))  # the same in every panel
        measure = next(iter(cells["dense"]))
        axis.set(title=f"{title}, dense {cells['dense'][measure]:.4g}", xlabel="sparsity, %", ylabel=measure)
        axis.set_yscale("log" if measure == "perplexity" else "linear")
        axis.legend(fontsize=7)
        if len(columns) == 1:
            axis.remove()
    print(drawing.save(figure, IMAGES / "pruning_comparison.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=[*SUBJECTS, "plot"])
    parser.add_argument("--seeds", type=int, default=1, help="how many; each has its own calibration data")
    parser.add_argument("--only", action="append", default=[], choices=METHODS, help="a method; may be repeated")
    parser.add_argument("--refit", action="store_true", help="refit every pruned model to the dense one's outputs")
    given = parser.parse_args()
    if given.subject == "plot":
        plot()
    else:
        compare(given.subject, list(range(given.seeds)), given.only, given.refit)


if __name__ == "__main__":
    main()

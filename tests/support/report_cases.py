"""Records of runs as run.json has them, made up, with values whose text on the page is known."""

import copy
import math
import random

ENVIRONMENT = {
    "mfac": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "system": "Linux x86_64", "processor": "Some CPU @ 2.70GHz",
    "threads": 2, "memory_gib": 23.5, "device": "cpu",
}  # fmt: skip
ASKED = (0.5, 0.8, 0.9, 0.95)
LOSSES = {"mfac": (0.0771, 0.1312, 0.2188, 0.4476), "magnitude": (0.0784, 0.7468, 1.6098, 2.1555)}
MEASURES = {"mfac": (0.978, 0.969, 0.951, 0.889), "magnitude": (0.983, 0.728, 0.425, 0.117)}


def run(kind, cells, title, /, **changes):
    record = {
        "format": 1, "kind": kind, "command": f"mfac {kind} digits --seed 7", "title": title,
        "task": {"name": "digits", "measure": "accuracy", "higher_is_better": True, "source": ""},
        "model": {"weights": 17226, "tensors": 6}, "environment": ENVIRONMENT,
        "settings": {"num_grads": 64, "damping": 1e-5, "pattern": None, "per_sample": False, "sparsity": [0.5, 0.9]},
        "started": "2026-01-01T12:00:00+00:00", "finished": "2026-01-01T12:03:20+00:00", "cells": cells,
    }  # fmt: skip
    if kind == "prune":
        record["dense"] = {"loss": 0.0746, "measure": 0.971}
    return copy.deepcopy(record | changes)


def prune_cell(label, asked, loss, measure, steps=8, layers=("0.weight", "2.weight", "4.weight"), **changes):
    predicts = label != "magnitude"
    history = [
        {"sparsity": asked * (step + 1) / steps, "predicted_increase": 1e-5 * 2 ** min(step, 20) if predicts else None,
         "loss_before": 0.05 + 0.01 * step, "loss_after": 0.06 + 0.01 * step, "seconds": 0.4}
        for step in range(steps)
    ]  # fmt: skip
    counts = [
        {"name": name, "weights": 1000 * (i + 1), "kept": int(1000 * (i + 1) * (1 - asked) * 0.9)}
        for i, name in enumerate(layers)
    ]
    cell = {
        "label": label, "method": label, "asked": asked, "sparsity": asked + 0.0001, "loss": loss, "measure": measure,
        "seconds": 3.25, "gradient_seconds": 2.875, "peak_bytes": 421 * 2**20, "layers": counts, "steps": history,
        "training": [],
        "files": {"weights": f"{label}-{asked}/weights.safetensors", "masks": f"{label}-{asked}/masks.safetensors"},
        "bytes": {"dense": 65536, "compact": int(65536 * (1 - asked + 0.03))},
    }  # fmt: skip
    return cell | changes


def pruning(title="Pruning of digits", labels=("mfac", "magnitude"), **changes):
    cells = [
        prune_cell(label, *figures)
        for label in labels
        for figures in zip(ASKED, LOSSES[label], MEASURES[label], strict=True)
    ]
    return run("prune", cells, title, **changes)


def gradual():
    cells = [prune_cell(label, 0.95, 0.2, 0.94, training=_tuning(label)) for label in ("mfac", "magnitude")]
    return run("prune", cells, "Gradual pruning")


def _tuning(label):
    draw = random.Random(label)
    return [{"step": 10 * i, "second": 0.1 * i, "loss": 0.1 + 0.05 * draw.random()} for i in range(1, 120)]


def train_cell(label, seed, steps=200, **changes):
    draw = random.Random(f"{label} {seed}")
    losses = [2.3 * math.exp(-40 * i / steps / (2 + seed)) + 0.1 * draw.random() + 0.02 for i in range(steps)]
    marks = range(steps // 10, steps + 1, steps // 10)
    evaluations = [
        {"step": at, "second": 0.02 * at, "loss": losses[at - 1], "measure": 1 - 0.4 * losses[at - 1] / 2.3}
        for at in marks
    ]
    cell = {
        "label": label, "optimizer": label, "seed": seed, "settings": {"lr": 1e-3, "num_grads": 64}, "steps": steps,
        "losses": losses, "seconds": [0.02 * (i + 1) for i in range(steps)], "evaluations": evaluations,
        "seconds_total": 4.125, "peak_bytes": 3 * 2**30, "files": {"weights": f"{label}-{seed}/weights.safetensors"},
    }  # fmt: skip
    return cell | changes


def training(title="Training on digits", labels=("mfac", "adam", "sgd"), seeds=3, steps=200, **changes):
    return run("train", [train_cell(label, seed, steps) for label in labels for seed in range(seeds)], title, **changes)


def twenty_methods():
    """Twenty labels at six sparsities with the layers of a ResNet-50."""
    layers = [f"layer{i // 14 + 1}.{i % 14 // 3}.conv{i % 3 + 1}.weight" for i in range(54)]
    cells = []
    for number in range(20):
        for asked in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98):
            quality = 1 - math.exp(-(1 - asked) * (8 + number))
            label = f"mfac m={64 * (number + 1)} λ=1e-{number % 5 + 3}"
            cells.append(prune_cell(label, asked, 2.3 - 2.2 * quality, 0.1 + 0.85 * quality, 16, layers, method="mfac"))
    return run("prune", cells, "Twenty ways to prune")


NASTY = "<script>alert(\"x\")</script> & „Größe“ '枝' <b>"


def nasty():
    """Text with everything that could break a page, in every place where a user's text goes."""
    record = pruning(NASTY, finished=None, command=f"mfac prune {NASTY}")
    record["task"] |= {"name": NASTY, "measure": f"score {NASTY}", "source": NASTY}
    record["settings"] |= {f"key {NASTY}": NASTY, "targets": "x" * 300}
    record["environment"] = ENVIRONMENT | {"processor": NASTY}
    for cell in record["cells"]:
        cell["label"] += NASTY
        cell["files"] = {NASTY: NASTY}
        for layer in cell["layers"]:
            layer["name"] += NASTY
    return record


def holes():
    """Null and missing wherever the format allows for it."""
    record = pruning("Holes")
    cells = record["cells"]
    for key in ("loss", "measure", "gradient_seconds", "peak_bytes", "bytes"):
        cells[1][key] = None
    cells[2] |= {"layers": [], "steps": [], "files": {}, "measure": None}
    cells[3]["steps"] = [step | {"loss_after": None, "predicted_increase": None} for step in cells[3]["steps"]]
    cells[4]["asked"] = None
    record["dense"] = {"loss": 0.0746, "measure": None}
    record["model"] = {"weights": 17226}
    return record

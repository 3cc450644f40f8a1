"""Records of runs as run.json has them, made up, with values whose text on the page is known."""

import copy
import math
import random

ASKED = (0.5, 0.8, 0.9, 0.95)
LOSSES = {"mfac": (0.0771, 0.1312, 0.2188, 0.4476), "magnitude": (0.0784, 0.7468, 1.6098, 2.1555)}
MEASURES = {"mfac": (0.978, 0.969, 0.951, 0.889), "magnitude": (0.983, 0.728, 0.425, 0.117)}
NASTY = "<script>alert(\"x\")</script> & „Größe“ '枝' $x <b>"


def run(kind, cells, title, /, **changes):
    record = {
        "format": 1, "kind": kind, "command": f"mfac {kind} digits --seed 7", "title": title,
        "task": {"name": "digits", "measure": "accuracy", "higher_is_better": True, "source": ""},
        "model": {"weights": 17226, "tensors": 6}, "environment": {"torch": "2.13.0", "threads": 2, "memory_gib": 23.5},
        "settings": {"num_grads": 64, "damping": 1e-5, "pattern": None, "per_sample": False, "sparsity": [0.5, 0.9]},
        "digests": {}, "started": "2026-01-01T12:00:00+00:00", "finished": "2026-01-01T12:03:20+00:00", "cells": cells,
    }  # fmt: skip
    if kind == "prune":
        record["dense"] = {"loss": 0.0746, "measure": 0.971}
    return copy.deepcopy(record | changes)


def prune_cell(label, asked, loss, measure, steps=8, layers=("0.weight", "2.weight", "4.weight"), **changes):
    history = [
        {"sparsity": asked * (i + 1) / steps, "loss_before": 0.05 + 0.01 * i, "loss_after": 0.06 + 0.01 * i,
         "predicted_increase": None if label == "magnitude" else 1e-5 * 2 ** min(i, 20)}
        for i in range(steps)
    ]  # fmt: skip
    weights = [1000 * (i + 1) for i in range(len(layers))]
    kept = [int(count * (1 - asked) * 0.9) for count in weights]
    cell = {
        "label": label, "method": label, "asked": asked, "sparsity": asked + 0.0001, "loss": loss, "measure": measure,
        "seconds": 3.25, "gradient_seconds": 2.875, "peak_bytes": 421 * 2**20, "steps": history, "training": [],
        "layers": [{"name": n, "weights": w, "kept": k} for n, w, k in zip(layers, weights, kept, strict=True)],
        "files": {name: f"{label}-{asked}/{name}.safetensors" for name in ("weights", "masks")},
        "bytes": {"dense": 65536, "compact": int(65536 * (1 - asked + 0.03))},
    }  # fmt: skip
    return cell | changes


def pruning(title="Pruning of digits", labels=("mfac", "magnitude"), **changes):
    values = {label: zip(ASKED, LOSSES[label], MEASURES[label], strict=True) for label in labels}
    return run("prune", [prune_cell(label, *cell) for label in labels for cell in values[label]], title, **changes)


def gradual():
    draw = random.Random(0)
    losses = [{"step": 10 * i, "second": 0.1 * i, "loss": 0.1 + 0.05 * draw.random()} for i in range(1, 120)]
    cells = [prune_cell(label, 0.95, 0.2, 0.94, training=losses) for label in ("mfac", "magnitude")]
    return run("prune", cells, "Gradual pruning")


def train_cell(label, seed, steps=200):
    draw = random.Random(f"{label} {seed}")
    losses = [2.3 * math.exp(-40 * i / steps / (2 + seed)) + 0.1 * draw.random() + 0.02 for i in range(steps)]
    evaluations = [
        {"step": at, "second": 0.02 * at, "loss": losses[at - 1], "measure": 1 - 0.4 * losses[at - 1] / 2.3}
        for at in range(steps // 10, steps + 1, steps // 10)
    ]
    return {
        "label": label, "optimizer": label, "seed": seed, "settings": {"lr": 1e-3, "num_grads": 64}, "steps": steps,
        "losses": losses, "seconds": [0.02 * (i + 1) for i in range(steps)], "evaluations": evaluations,
        "seconds_total": 4.125, "peak_bytes": 3 * 2**30, "files": {"weights": f"{label}-{seed}/weights.safetensors"},
    }  # fmt: skip


def training(title="Training on digits", labels=("mfac", "adam", "sgd"), seeds=3):
    return run("train", [train_cell(label, seed) for label in labels for seed in range(seeds)], title)


def twenty_methods():
    """Twenty labels at six sparsities with the layers of a ResNet-50."""
    layers, cells = [f"layer{i // 14 + 1}.{i % 14 // 3}.conv{i % 3 + 1}.weight" for i in range(54)], []
    for number in range(20):
        for asked in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98):
            quality = 1 - math.exp(-(1 - asked) * (8 + number))
            label = f"mfac m={64 * (number + 1)} λ=1e-{number % 5 + 3}"
            cells.append(prune_cell(label, asked, 2.3 - 2.2 * quality, 0.1 + 0.85 * quality, 16, layers))
    return run("prune", cells, "Twenty ways to prune")


def nasty():
    """Text with everything that could break a page, in every place where a user's text goes."""
    record = pruning(NASTY, finished=None, command=f"mfac prune {NASTY}")
    record["task"] |= {"name": NASTY, "measure": f"score {NASTY}", "source": NASTY}
    record["settings"] |= {f"key {NASTY}": NASTY, "targets": "x" * 300}
    for cell in record["cells"]:
        cell |= {"label": cell["label"] + NASTY, "files": {NASTY: NASTY}}
        cell["layers"] = [layer | {"name": layer["name"] + NASTY} for layer in cell["layers"]]
    return record


def holes():
    """Null wherever the format allows for it."""
    record = pruning("Holes", dense={"loss": 0.0746, "measure": None})
    cells = record["cells"]
    cells[1] |= {"loss": None, "measure": None}
    cells[3]["steps"] = [step | {"loss_after": None, "predicted_increase": None} for step in cells[3]["steps"]]
    return record

"""Table 2: seconds of a pruning step, M-FAC against WoodFisher, over block size and number of gradients.

A step here is only its linear algebra: the inverse, its diagonal (the scores) and one product (the update), in
float32, on one thread. On ResNet20 the gradients are real; for the sizes of MobileNetV1 and ResNet50 they are random,
since times do not depend on their values. Where the whole does not fit into 3 GiB, or takes too long, a part is timed
and scaled, and the cell says so: some of the blocks, which are independent; some of WoodFisher's steps, which are all
alike; for the full matrix of M-FAC a line through two slices. Memory is computed: WoodFisher keeps B numbers per
weight, M-FAC the m gradients and the factors of its m x m (or B x B) matrices. "OOM" is more than the 512 GB of the
paper's machine.

4 minutes on one core.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mfac
from experiments import data, drawing
from experiments.baselines.woodfisher import rank_one_steps
from experiments.image_task import untrained_resnet8
from experiments.models.resnet import mfac_resnet20
from experiments.recipe import Recipe, Results
from experiments.training import cross_entropy
from mfac.pages import block_runs

DAMPING = 1e-5
PAPER_MEMORY = 512e9
ROWS_LIMIT = 3 * 2**30  # bytes of gradients that are made at once
# (model, block size or None for the full matrix, gradients): the paper's minutes, WoodFisher's and M-FAC's.
PAPER: dict[tuple[str, int | None, int], tuple[float | None, float]] = {
    ("MobileNetV1", 10_000, 400): (60.0, 0.5),
    ("MobileNetV1", 10_000, 4000): (None, 8.7),
    ("MobileNetV1", None, 1000): (None, 1.2),
    ("ResNet50", 2000, 400): (35.0, 2.5),
    ("ResNet50", 10_000, 1000): (None, 14.0),
    ("ResNet50", None, 512): (None, 4.7),
}
RESNET20: tuple[tuple[int | None, int], ...] = ((128, 64), (128, 400), (2000, 400), (10_000, 400), (None, 400))
# Weights of two and more dimensions, which are pruned: the counts of all weights without batch norm and biases.
WEIGHTS = {"MobileNetV1": 4_209_088, "ResNet50": 25_502_912}


@dataclass(frozen=True)
class Settings:
    slice_bytes: int = 160 * 2**20  # of gradients in a slice
    woodfisher_seconds: float = 5.0  # after which its recursion is cut, and scaled
    limit: int | None = None  # on columns, for smoke tests
    rows: int | None = None  # likewise


def measure(results: Results, settings: Settings) -> None:
    for model, block, m in (*PAPER, *(("ResNet20", *row) for row in RESNET20)):
        compute = with_real_gradients if model == "ResNet20" else with_random_gradients
        results.row(f"{model}, blocks of {block or 'all'}, {m} gradients", partial(compute, model, block, m, settings))


def with_random_gradients(model: str, block: int | None, m: int, settings: Settings) -> dict[str, Any]:
    theirs, ours = PAPER[model, block, m]
    d = min(WEIGHTS[model], settings.limit or WEIGHTS[model])
    m, block = min(m, settings.rows or m), None if block is None else min(block, d)

    def columns(count: int) -> Tensor:
        G = torch.randn(m, count, generator=torch.Generator().manual_seed(0))
        return G.div_(G.norm(dim=1, keepdim=True))

    return measured(columns, d, block, m, None, settings) | {
        "gradients": "random",
        "paper_minutes": {"WoodFisher": theirs, "M-FAC": ours},
        "paper_ratio": None if theirs is None else theirs / ours,
    }


def with_real_gradients(_: str, block: int | None, m: int, settings: Settings) -> dict[str, Any]:
    """ResNet20 with gradients of 16 training images each; no block straddles two tensors."""
    model = mfac_resnet20() if settings.limit is None else untrained_resnet8()
    m, block = min(m, settings.rows or m), None if block is None else min(block, settings.limit or block)
    batches = data.cifar_batches(16, data.HALVES, seed=0, augment=False)
    pruned = {n: p for n, p in model.named_parameters() if p.ndim > 1}
    began = time.process_time()
    G = mfac.collect_gradients(model, cross_entropy, batches, m, params=list(pruned), progress=False)
    spent = time.process_time() - began
    sizes = None if block is None else [p.numel() for p in pruned.values()]
    cell = measured(lambda count: G[:, :count], G.shape[1], block, m, sizes, settings)
    return cell | {"gradients": "of 16 images each", "gradient_seconds": round(spent, 2)}


def measured(
    columns: Callable[[int], Tensor], d: int, block: int | None, m: int, sizes: list[int] | None, settings: Settings
) -> dict[str, Any]:
    lengths = block_lengths(d, block, sizes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = mfac_seconds(columns, d, block, m, sizes, settings)
        theirs = woodfisher_seconds(columns, lengths, m, settings)
    finally:
        torch.set_num_threads(threads)
    needed = {"M-FAC": mfac_bytes(lengths, m), "WoodFisher": woodfisher_bytes(lengths)}
    return {
        "weights": d, "block_size": block, "num_grads": m,
        "M-FAC": ours, "WoodFisher": theirs,
        "ratio": None if theirs is None else theirs["seconds"] / ours["seconds"],
        "bytes": needed,
        "OOM at 512 GB": {who: count > PAPER_MEMORY for who, count in needed.items()},
    }  # fmt: skip


def block_lengths(d: int, block: int | None, sizes: list[int] | None) -> dict[int, int]:
    """{length: number of blocks}, the longest first."""
    lengths: Counter[int] = Counter()
    for run in block_runs(d, block, sizes):
        lengths[run.length] += run.count
    return dict(sorted(lengths.items(), reverse=True))


def mfac_bytes(lengths: dict[int, int], m: int) -> int:
    """The gradients in float32, and for every block a float64 factor of m x m or, if smaller, its own size."""
    return sum(count * (4 * m * b + 8 * min(b, m) ** 2) for b, count in lengths.items())


def woodfisher_bytes(lengths: dict[int, int]) -> int:
    return sum(4 * count * b**2 for b, count in lengths.items())


def mfac_seconds(
    columns: Callable[[int], Tensor], d: int, block: int | None, m: int, sizes: list[int] | None, settings: Settings
) -> dict[str, Any]:
    """Inverse, diagonal and one product; in slices where the gradients do not fit."""
    if 4 * m * d <= min(ROWS_LIMIT, 8 * settings.slice_bytes):
        return {"seconds": _static(columns(d), block, sizes), "timed": "the whole"}
    width = max(block or 1, settings.slice_bytes // (4 * m) // (block or 1) * (block or 1))
    if block is not None:
        count = min(width, d - d % block)
        spent = _static(columns(count), block, None)
        return {"seconds": spent * d / count, "timed": f"{count // block} of {math.ceil(d / block)} blocks, scaled"}
    # The better of two: the difference between the slices is multiplied many times.
    half, whole = (min(_static(columns(count), None, None) for _ in range(2)) for count in (width // 2, width))
    slope = (whole - half) / (width - width // 2)
    told = f"{width // 2} and {width} of {d} columns, continued in a straight line"
    return {"seconds": whole + slope * (d - width), "timed": told}


def _static(G: Tensor, block: int | None, sizes: list[int] | None) -> float:
    x = G[0].clone()
    began = time.process_time()
    operator = mfac.StaticInverseFisher(G, DAMPING, block_size=block, sizes=sizes)
    operator.diagonal()
    operator @ x
    return time.process_time() - began


def woodfisher_seconds(
    columns: Callable[[int], Tensor], lengths: dict[int, int], m: int, settings: Settings
) -> dict[str, Any] | None:
    """Some of the longest blocks, as many of the m steps as the time allows, scaled; None if no block fits."""
    b, there = next(iter(lengths.items()))
    count = max(1, min(there, 2**22 // b**2))  # blocks side by side, while they are small
    if 8 * count * b**2 > ROWS_LIMIT:
        return None
    rows = columns(count * b).T.reshape(count, b, m).transpose(1, 2).contiguous()
    few = max(1, min(m, 4))
    trial = _recursion(rows[:, :few], m) / few
    steps = int(min(m, max(few, settings.woodfisher_seconds / max(trial, 1e-9))))
    spent = _recursion(rows[:, :steps], m)
    share = count * b**2 / sum(number * length**2 for length, number in lengths.items())
    told = f"{count} blocks of {b} ({share:.3g} of the work), {steps} of {m} gradients, scaled"
    return {"seconds": spent * m / steps / share, "timed": told}


def _recursion(rows: Tensor, m: int) -> float:
    began = time.process_time()
    inverse = rank_one_steps(rows, DAMPING, m)
    inverse.diagonal(dim1=1, dim2=2).clone()
    inverse @ rows[:, 0, :, None]
    return time.process_time() - began


def draw(results: Results, settings: Settings) -> Path:
    groups = {}
    for key, cell in results.cells.items():
        print(_line(key, cell))
        group = {"M-FAC": cell["M-FAC"]["seconds"] / 60}
        if cell["WoodFisher"] is not None:
            oom = ", OOM" if cell["OOM at 512 GB"]["WoodFisher"] else ""
            group[f"WoodFisher{oom}"] = cell["WoodFisher"]["seconds"] / 60
        told = cell.get("paper_minutes", {})
        group |= {f"{who}, the paper's": minutes for who, minutes in told.items() if minutes is not None}
        groups[key.replace(", ", "\n")] = group
    y, title = "minutes of one core (the paper's: on a GPU)", "A pruning step: the inverse, its diagonal and a product"
    return drawing.bars(results.picture, groups, y=y, title=title, yscale="log")


def _line(key: str, cell: dict[str, Any]) -> str:
    theirs = cell["WoodFisher"]
    told = "does not fit here" if theirs is None else f"{theirs['seconds']:.0f} s, {cell['ratio']:.0f} times"
    oom = " (OOM at 512 GB)" if cell["OOM at 512 GB"]["WoodFisher"] else ""
    gigabytes = {who: f"{count / 1e9:.3g} GB" for who, count in cell["bytes"].items()}
    return f"{key}: M-FAC {cell['M-FAC']['seconds']:.1f} s, WoodFisher {told}{oom}; {gigabytes}"


RECIPE = Recipe(
    "table2", "seconds of a pruning step, M-FAC against WoodFisher (table 2)", measure, draw, Settings(),
    Settings(slice_bytes=2**20, woodfisher_seconds=0.05, limit=600, rows=12), minutes=4,
)  # fmt: skip

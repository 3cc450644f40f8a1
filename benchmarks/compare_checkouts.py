"""This checkout against an older one, measured in turns: `python benchmarks/compare_checkouts.py ../older-checkout`.

Each measurement runs in processes of its own, with one thread; the best time counts. Above 1 is slower than before.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import torch
from torch import nn

ROUNDS = 3


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.inside(x))


def classify(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512, num_labels=2
    )
    batch = {"input_ids": torch.randint(1, 30000, (32, 64)), "labels": torch.randint(0, 2, (32,))}
    return BertForSequenceClassification(config), (lambda model, batch: model(**batch).loss), batch


def measurements(mfac):
    """{name: a callable, warmed up}"""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    images = (torch.randn(128, 784), torch.randint(10, (128,)))
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), *[Residual(16) for _ in range(3)])
    cnn = nn.Sequential(stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    pictures = (torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
    for window in (torch.float32, torch.bfloat16, torch.int8):
        for m, d in ((64, 100_000), (256, 100_000)):
            op, g = mfac.DynamicInverseFisher(m, d, 1e-3, window=window), torch.randn(m, d) / d**0.5
            for row in g:
                op.update(row)
            rows = cycle(g)
            yield (
                f"update_and_apply, {str(window)[6:]}, m = {m}, d = {d:,}",
                lambda op=op, rows=rows: op.update_and_apply(next(rows)),
            )
    G = nn.functional.normalize(torch.randn(512, 50_000))
    yield "product G Gᵀ, m = 512, d = 50,000", lambda: G @ G.T
    yield "static set-up and diagonal of the same", lambda: mfac.StaticInverseFisher(G, 1e-5).diagonal()
    yield (
        "blocks of 128, m = 64, d = 50,000",
        lambda: mfac.StaticInverseFisher(G[:64], 1e-5, block_size=128).diagonal(),
    )
    yield "rows per batch of 128, MLP", lambda: mfac.collect_gradients(mlp, classify, [images] * 64, 64)
    model, loss, batch = bert()
    for name, args, count in (("MLP", (mlp, classify, images), 128), ("BERT-tiny", (model, loss, batch), 32),
                              ("residual CNN", (cnn, classify, pictures), 64)):  # fmt: skip
        yield (
            f"{count} rows per sample, {name}",
            lambda args=args, count=count: mfac.collect_gradients(
                *args[:2], [args[2]], count, per_sample=True, method="vmap"
            ),
        )


def work():
    """Prints {name: best seconds} for the package on the path."""
    import mfac

    torch.set_num_threads(1)
    best = {}
    for name, call in measurements(mfac):
        for _ in range(8):
            start = time.perf_counter()
            call()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
    json.dump(best, sys.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older", type=Path, nargs="?")
    older = parser.parse_args().older
    if older is None:
        return work()
    best = {}
    for checkout in [older, Path(__file__).parents[1]] * ROUNDS:
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        found = subprocess.run([sys.executable, __file__], env=environment, check=True, stdout=subprocess.PIPE).stdout
        for name, taken in json.loads(found).items():
            before = best.setdefault(name, {}).get(checkout, taken)
            best[name][checkout] = min(taken, before)
    print("| | before, ms | after, ms | ratio |\n| --- | --- | --- | --- |")
    for name, (before, after) in {name: times.values() for name, times in best.items()}.items():
        print(f"| {name} | {1e3 * before:.2f} | {1e3 * after:.2f} | {after / before:.2f} |")


if __name__ == "__main__":
    main()

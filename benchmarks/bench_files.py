"""Gradient files by storage: bytes, time to collect and to invert, and the effect on the answers.

    OMP_NUM_THREADS=1 python benchmarks/bench_files.py

Per-sample gradients of a network trained on handwritten digits. Answers are compared with those of the float32 file:
the cosine of F⁻¹x, x the gradient of held-out images, and the correlation of the logarithms of the diagonals, by which
pruning ranks.
"""

import tempfile
import time
from pathlib import Path

import torch

import mfac
from peers.pruning import digits, loss_fn, trained
from timing import save

D, M, DAMPING = 100_000, 256, 1e-4
STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measured(model, batches, name, folder):
    """The row of the table, and the answers."""
    path = Path(folder) / name
    began = time.perf_counter()
    file = mfac.collect_gradients(
        model, loss_fn, batches, M, per_sample=True, out=path, window=STORAGES[name], progress=False
    )
    collected = time.perf_counter() - began
    began = time.perf_counter()
    inverse = mfac.StaticInverseFisher(file, DAMPING)
    diagonal = inverse.diagonal()
    row = {"storage": name, "d": file.dim, "m": M, "bytes": path.stat().st_size, "collect_s": collected}
    return {**row, "set_up_and_diagonal_s": time.perf_counter() - began}, inverse, diagonal


def likeness(inverse, diagonal, x, true, true_diagonal):
    logs = torch.stack((diagonal.log(), true_diagonal.log())).double()
    return {
        "cosine": float(torch.cosine_similarity(inverse @ x, true, dim=0)),
        "diagonal_correlation": float(torch.corrcoef(logs)[0, 1]),
    }


def rows():
    train, test = digits()
    model = trained(D, train)
    batches = list(zip(train[0].split(128), train[1].split(128), strict=True))
    x = mfac.collect_gradients(model, loss_fn, [test], 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        for name in STORAGES:
            row, inverse, diagonal = measured(model, batches, name, folder)
            if name == "float32":
                true, true_diagonal, whole = inverse @ x, diagonal, row["bytes"]
            like = likeness(inverse, diagonal, x, true, true_diagonal)
            yield {**row, **like, "of_float32": row["bytes"] / whole}


if __name__ == "__main__":
    save("files", "OMP_NUM_THREADS=1 python benchmarks/bench_files.py", rows())

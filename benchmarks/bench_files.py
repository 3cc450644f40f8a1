"""Files of gradients by storage: bytes, time to collect and to invert, and what compression does to the answers.

    OMP_NUM_THREADS=1 python benchmarks/bench_files.py

Gradients are those of a trained network on handwritten digits, a sample each. Answers are compared with those of the
float32 file: F⁻¹ of the gradient of images that were held back (its cosine), and the diagonal of F⁻¹ (the correlation
of the logarithms, since pruning ranks by it). "With error feedback" is what a file does not do: rows that carry what
the ones before have lost.
"""

import tempfile
import time
from pathlib import Path

import torch

import mfac
from peers.pruning import digits, loss_fn, trained
from timing import save, show

D, M, DAMPING = 100_000, 256, 1e-4
STORAGES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


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


def with_error_feedback(file, kind):
    """The rows of a window that hands on what it does not keep."""
    window = mfac.DynamicInverseFisher(M, file.dim, DAMPING, window=kind)
    for k in range(M):
        window.update(file.read_rows(k, k + 1)[0])
    return mfac.StaticInverseFisher(window.rows, DAMPING)


def likeness(inverse, diagonal, x, true, true_diagonal):
    logs = torch.stack((diagonal.log(), true_diagonal.log())).double()
    return {
        "cosine": float(torch.cosine_similarity(inverse @ x, true, dim=0)),
        "diagonal_correlation": float(torch.corrcoef(logs)[0, 1]),
    }


def main():
    train, test = digits()
    model = trained(D, train)
    batches = list(zip(train[0].split(128), train[1].split(128), strict=True))
    x, rows = mfac.collect_gradients(model, loss_fn, [test], 1)[0], []
    with tempfile.TemporaryDirectory() as folder:
        for name in STORAGES:
            row, inverse, diagonal = measured(model, batches, name, folder)
            if name == "float32":
                plain = mfac.GradientFile(Path(folder) / name)
                true, true_diagonal, whole = inverse @ x, diagonal, row["bytes"]
            like = likeness(inverse, diagonal, x, true, true_diagonal)
            rows.append({**row, **like, "of_float32": row["bytes"] / whole})
            show(rows[-1])
            inverse = with_error_feedback(plain, STORAGES[name])
            like = likeness(inverse, inverse.diagonal(), x, true, true_diagonal)
            rows.append({"storage": f"{name}, with error feedback", "d": plain.dim, "m": M, **like})
            show(rows[-1])
    save("files", "OMP_NUM_THREADS=1 python benchmarks/bench_files.py", rows)


if __name__ == "__main__":
    main()

"""A G of 6 GiB on disk with a budget of 1 GiB: resident memory, measured in a process of its own, and time."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import mfac
from timing import save

DAMPING, BUDGET = 1e-5, 2**30


def write(path, m, d):
    """Rows in the file as the collector leaves them."""
    file = mfac.GradientFile.create(path, m, d)
    generator = torch.Generator().manual_seed(0)
    for _ in range(m):
        file.append(torch.randn(d, generator=generator) / d**0.5)


def measure(path, where):
    """Set-up and diagonal, from disk or with everything in memory; prints seconds and the peak of resident memory."""
    file = mfac.GradientFile(path)
    # A quarter of the budget for a page; the rest is Python, torch, a page being read, and vectors.
    source, page_size = (file, BUDGET // 4 // 4 // file.num_grads) if where == "disk" else (_load(file), None)
    start = time.perf_counter()
    op = mfac.StaticInverseFisher(source, DAMPING, page_size=page_size)
    diagonal = op.diagonal()
    elapsed = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": elapsed, "peak": peak, "sum": float(diagonal.double().sum())}))


def _load(file):
    rows = torch.empty(file.shape)
    for k in range(file.rows):
        rows[k] = file.read_rows(k, k + 1)[0]
    return rows


def in_process(path, where):
    command = [sys.executable, __file__, "measure", str(path), where]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def compare(m, gib=6):
    d = gib * 2**30 // (4 * m)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        write(path, m, d)
        best = {}
        for where in ("disk", "memory", "disk", "memory"):
            result = in_process(path, where)
            if where not in best or result["seconds"] < best[where]["seconds"]:
                best[where] = result
    assert abs(best["disk"]["sum"] / best["memory"]["sum"] - 1) < 1e-6
    return {
        "what": "set-up and diagonal from disk", "m": m, "d": d, "gib_on_disk": gib, "budget_gib": BUDGET / 2**30,
        "disk_s": best["disk"]["seconds"], "memory_s": best["memory"]["seconds"],
        "of_the_time_in_memory": best["disk"]["seconds"] / best["memory"]["seconds"],
        "peak_resident_gib": best["disk"]["peak"] / 2**30,
        "peak_resident_in_memory_gib": best["memory"]["peak"] / 2**30,
    }  # fmt: skip


def main():
    save("pages", "python benchmarks/bench_pages.py", [compare(256)])


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1:2] == ["measure"] else main()

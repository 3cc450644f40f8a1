"""What a user would pick instead, side by side on one machine: time, memory and error against float64.

    python benchmarks/bench_peers.py             # d from 1e4 to 1e7, m from 16 to 4096: half an hour on two cores
    python benchmarks/bench_peers.py --quick     # a smaller grid: two minutes; written to build/bench only

Every cell of the grid is measured in a process of its own. One that would not fit into memory is not begun, one that
takes too long is stopped, and the table says so. A run that is interrupted goes on with the next cell.
"""

import argparse
import shutil
from functools import partial
from pathlib import Path

from mfac.memory import available_memory
from peers import inverses, machine, matrices, pruning, steps, training
from peers.cells import PATIENCE, Journal, Limits, name_of, run_cell
from timing import environment, save

WORK = Path(__file__).resolve().parent.parent / "build" / "bench"
SIZES = {
    "full": {"d": (10**4, 10**5, 10**6, 10**7), "m": (16, 64, 256, 1024, 4096), "pruned": (10**4, 10**5, 10**6)},
    "quick": {"d": (10**4, 10**5, 10**6), "m": (16, 64, 256), "pruned": (10**4,)},
    "smoke": {"d": (10**3,), "m": (256,), "pruned": ()},  # the system counts memory to some 0.3 MB
}
SECONDS = {"full": 12.0, "quick": 4.0, "smoke": 4.0}
REPEATED = {"full": 0.3, "quick": 0.2, "smoke": 0.01}


def grid(size):
    """Every cell, in the order of measuring: what others need first, small before large."""
    sizes = SIZES[size]
    pairs = sorted(((d, m) for d in sizes["d"] for m in sizes["m"]), key=lambda pair: pair[0] * pair[1])
    yield {"task": "machine", "method": "limits", "d": 0, "m": None}
    for d, m in pairs:
        yield {"task": "truth", "method": "float64", "d": d, "m": m}
        for method in inverses.CONTENDERS:
            yield {"task": "inverse", "method": method, "d": d, "m": m}
        for method in steps.NEEDS:
            yield {"task": "step", "method": method, "d": d, "m": m}
    for d in sizes["d"]:
        for method in training.CONTENDERS:
            m = int(method.split("m = ")[1].split(",")[0]) if "m = " in method else None
            if m is None or m <= max(sizes["m"]):
                yield {"task": "training", "method": method, "d": d, "m": m}
    for d in sizes["pruned"]:
        for method in pruning.METHODS:
            yield {"task": "pruning", "method": method, "d": d, "m": None}


def needs(cell):
    """Bytes that the cell must hold, computed before anything is."""
    m, d = cell["m"], cell["d"]
    formulas = {
        "machine": lambda: 2e9,
        "truth": lambda: 4 * m * d + 64 * d + 40 * m * m,
        "inverse": lambda: inverses.CONTENDERS[cell["method"]][1](m, d) + 24 * d,
        "step": lambda: steps.NEEDS[cell["method"]](m, d) + 24 * d,
        "training": lambda: training.needs(cell),
        "pruning": lambda: pruning.needs(cell),
    }
    return int(formulas[cell["task"]]())


def measure(cell, report, folder):
    tasks = {"machine": machine, "inverse": inverses, "step": steps, "training": training, "pruning": pruning}
    if cell["task"] == "truth":
        report.ready()
        return matrices.save_truth(folder, cell["m"], cell["d"]) or {}
    return tasks[cell["task"]].measure(cell, report, folder)


def run(size, journal, folder, limits):
    """All cells that the journal does not have."""
    cells = list(grid(size))
    for number, cell in enumerate(cells, 1):
        if name_of(cell) in journal.results:
            continue
        place = f"d {cell['d']:,}" + ("" if cell["m"] is None else f"  m {cell['m']}")
        print(f"[{number} of {len(cells)}] {cell['task']}: {cell['method']}  {place}", end="  ", flush=True)
        before = [(other, journal.results[name_of(other)]) for other in cells[: number - 1]]
        # The truth is one matrix more to be patient with, and no contender.
        allowed = Limits(limits.bytes, 5 * limits.seconds) if cell["task"] == "truth" else limits
        result = run_cell(cell, partial(measure, folder=folder), needs, allowed, before)
        journal.add(cell, result)
        print(summary(result), flush=True)
    return [{**cell, **journal.results[name_of(cell)]} for cell in cells]


def summary(result):
    if result["outcome"] != "measured":
        return result["why"]
    shown = {key: value for key, value in result.items() if isinstance(value, float)}
    return "  ".join(f"{key} {value:.3g}" for key, value in shown.items())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller grid, in two minutes")
    parser.add_argument("--smoke", action="store_true", help="a few cells, in seconds: that it runs")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run has measured")
    parser.add_argument("--seconds", type=float, help="after which a cell is stopped")
    parser.add_argument("--gigabytes", type=float, help="beyond which a cell is not begun; 0.75 of what is available")
    options = parser.parse_args(arguments)
    size = "smoke" if options.smoke else "quick" if options.quick else "full"
    folder = WORK / f"peers_{size}"
    PATIENCE["seconds"] = REPEATED[size]
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    # Whole gigabytes: what is available differs a little from minute to minute, and a journal is of one limit.
    free = options.gigabytes or round(0.75 * available_memory(matrices.torch.device("cpu")) / 1e9)
    limits = Limits(int(free * 1e9), options.seconds or SECONDS[size])
    journal = Journal(folder / "journal.jsonl", {"environment": environment(), "seconds": limits.seconds, "size": size})
    rows = run(size, journal, folder, limits)
    flag = "" if size == "full" else f" --{size}"
    where = {} if size == "full" else {"folder": WORK}
    save("peers" if size == "full" else f"peers_{size}", f"python benchmarks/bench_peers.py{flag}", rows, **where)
    shutil.rmtree(folder)
    if size != "full":
        print(f"wrote {WORK / f'peers_{size}.json'}; pictures of it: python benchmarks/report.py --{size}")


if __name__ == "__main__":
    main()

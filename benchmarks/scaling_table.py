"""Memory, arithmetic and messages of a step for models of 1 and 7 billion weights, from the figures measured here.

    python benchmarks/scaling_table.py            # prints the tables
    python benchmarks/scaling_table.py --write    # puts them into docs/scaling.md

Memory is what `window_bytes` says. Time is that of two passes over a rank's columns at the speed which
`benchmarks/results/windows.json` has for each storage. Messages are counted, not timed: m float64 numbers are summed
in a ring, and a data-parallel step is gathered in float32.
"""

import argparse
import json
import re
from itertools import product
from pathlib import Path

import torch

import mfac
from mfac.windows.storage import window_bytes
from page_text import size, table
from timing import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
MODELS = {"1B": 10**9, "7B": 7 * 10**9}
WINDOWS, RANKS = (64, 256, 1024), (8, 64, 512)
STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "top-k 1 %": mfac.TopK(0.01)}


def seconds_a_number():
    """Seconds of a step for each number of the window, by storage, at the largest d measured, and there the last m."""
    rows = json.loads((RESULTS / "windows.json").read_text())["rows"]
    steps = [row for row in rows if row["what"] == "step" and row["storage"] in STORAGES]
    return {row["storage"]: row["step_s"] / (row["m"] * row["d"]) for row in sorted(steps, key=lambda row: row["d"])}


def memory():
    """Bytes a rank, by model, window and storage."""
    rows = []
    for model, m, ranks in product(MODELS, WINDOWS, RANKS):
        held = [size(window_bytes(m, -(-MODELS[model] // ranks), kind)) for kind in STORAGES.values()]
        rows.append([model, m, ranks, *held])
    return table(["model", "m", "ranks", *STORAGES], rows)


def arithmetic():
    """Operations, seconds and messages a rank and step."""
    pace, rows = seconds_a_number(), []
    for model, m, ranks in product(MODELS, WINDOWS, RANKS):
        share, others = -(-MODELS[model] // ranks), (ranks - 1) / ranks
        times = [f"{pace[name] * m * share:.3g} s" for name in ("float32", "int8", "top-k 1 %")]
        sums, gathered = 2 * others * 8 * m, others * 4 * MODELS[model]
        work = f"{4 * m * share / 1e9:.3g} Gflop"
        rows.append([model, m, ranks, work, *times, size(sums), size(sums + gathered)])
    heads = ["model", "m", "ranks", "two passes", "float32", "int8", "top-k 1 %", "sent (FSDP2)", "sent (DDP)"]
    return table(heads, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    tables = {"memory": memory(), "arithmetic": arithmetic()}
    if not parser.parse_args().write:
        print("\n\n".join(tables.values()))
        return
    text = PAGE.read_text()
    for name, content in tables.items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = f"(?s){re.escape(marks[0])}.*?{re.escape(marks[1])}"
        text = re.sub(pattern, lambda _, c=content, m=marks: f"{m[0]}\n\n{c}\n\n{m[1]}", text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""Every benchmark, one after the other, each in a process of its own; then the pages that show them."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = [
    "bench_dynamic",
    "profile_step",
    "bench_static",
    "bench_blocks",
    "bench_scaling",
    "bench_pages",
    "bench_gradients",
    "bench_files",
    "bench_optimizer",
    "bench_windows",
    "bench_peers",
    "bench_distributed",
]
# Gradients of small networks are small work: with several threads it is their meeting that would be measured.
ONE_THREAD = ("bench_gradients", "bench_files")


def main():
    for number, script in enumerate(SCRIPTS, 1):
        print(f"[{number} of {len(SCRIPTS)}] {script}", flush=True)
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if script in ONE_THREAD else {}
        subprocess.run([sys.executable, HERE / f"{script}.py"], check=True, env=os.environ | threads)
    subprocess.run([sys.executable, HERE / "report.py"], check=True)
    subprocess.run([sys.executable, HERE / "scaling_table.py", "--write"], check=True)


if __name__ == "__main__":
    main()

"""Every benchmark, one after the other, each in a process of its own; then the page that shows them."""

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


def main():
    for number, script in enumerate(SCRIPTS, 1):
        print(f"[{number} of {len(SCRIPTS)}] {script}", flush=True)
        # Gradients of small networks are small work: with several threads it is their meeting that would be measured.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if script == "bench_gradients" else {}
        subprocess.run([sys.executable, HERE / f"{script}.py"], check=True, env=os.environ | threads)
    subprocess.run([sys.executable, HERE / "report.py"], check=True)


if __name__ == "__main__":
    main()

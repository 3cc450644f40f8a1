"""Measures, each benchmark in a process of its own, and writes the tables and pictures of the pages.

python benchmarks/run.py                    # every benchmark: an hour
python benchmarks/run.py static gradients   # these
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("dynamic", "profile_step", "static", "blocks", "scaling", "pages", "gradients", "files", "optimizer",
         "windows", "peers", "distributed")  # fmt: skip
# Gradients of small networks are small work: with several threads it is their meeting that would be measured.
ONE_THREAD = ("gradients", "files", "blocks")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all of them by default")
    names = parser.parse_args().names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for number, name in enumerate(names, 1):
        print(f"[{number} of {len(names)}] {name}", flush=True)
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if name in ONE_THREAD else {}
        script = HERE / (f"{name}.py" if name.startswith("profile") else f"bench_{name}.py")
        subprocess.run([sys.executable, script], check=True, env=os.environ | threads)
    subprocess.run([sys.executable, HERE / "report.py", *names], check=True)
    if "windows" in names:
        subprocess.run([sys.executable, HERE / "scaling_table.py", "--write"], check=True)


if __name__ == "__main__":
    main()

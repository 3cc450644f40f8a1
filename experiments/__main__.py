"""Every table and figure of the paper by one command.

python -m experiments list                                # the recipes
python -m experiments run table2                          # at a size for two cores
python -m experiments run table2 --jobs 2                 # in two processes of one thread each, which share the rows
python -m experiments run all                             # one after the other

Existing results are shown and drawn, not measured again, and the project's are committed: MFAC_RESULTS=FOLDER measures
into a folder of your own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.ledger import RESULTS
from experiments.recipe import SIZES, SMOKE, Request
from experiments.recipes import RECIPES


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="what", required=True)
    verbs.add_parser("list", help="the recipes")
    run = verbs.add_parser("run", help="run a recipe, or resume it, and draw its results")
    run.add_argument("recipe", choices=[*RECIPES, "all"])
    run.add_argument("--size", choices=SIZES, default="small")
    run.add_argument("--folder", type=Path, help="of the results; default: MFAC_RESULTS, or experiments/results")
    run.add_argument("--only", default="", help="rows whose name contains this")
    run.add_argument("--jobs", type=int, default=1, help="processes of one thread each, which share the rows")
    run.add_argument("--shared", type=Path, help=argparse.SUPPRESS)  # tells such a process where rows are noted
    given = parser.parse_args(argv)
    if given.what == "list":
        for name, recipe in RECIPES.items():
            print(f"{name:18} {recipe.title}; {recipe.minutes} min")
        return
    folder = given.folder or (SMOKE if given.size == "smoke" else RESULTS)
    request = Request(given.size, folder, given.only, given.shared)
    run_all(request, given.jobs) if given.recipe == "all" else run_one(given.recipe, request, given.jobs)


def run_one(name: str, request: Request, jobs: int = 1) -> None:
    """One recipe, and its plot if all of it was asked for."""
    began = time.perf_counter()
    if jobs > 1:
        run_in_processes(name, request, jobs)
    RECIPES[name].run(request)
    if not request.only and not request.shared:
        print(f"{name}: {RECIPES[name].plot(request)}, {time.perf_counter() - began:.0f} s", flush=True)


def run_in_processes(name: str, request: Request, jobs: int) -> None:
    """Each row by the next free process, in one file of results; RuntimeError if a process failed."""
    command = [sys.executable, "-m", "experiments", "run", name, "--size", request.size, "--folder", request.folder]
    command += ["--only", request.only]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mfac-rows-") as shared:
        workers = [subprocess.Popen([*command, "--shared", shared], env=os.environ | one_thread) for _ in range(jobs)]
        codes = [worker.wait() for worker in workers]
    if any(codes):
        raise RuntimeError(f"a process that worked on {name} ended with {max(codes, key=abs)}; see its message above")


def run_all(request: Request, jobs: int = 1) -> None:
    """All recipes; a failure does not stop the others."""
    began = time.perf_counter()
    failed = []
    for number, (name, recipe) in enumerate(RECIPES.items(), 1):
        place = f"{number} of {len(RECIPES)}: {name}"
        spent = (time.perf_counter() - began) / 60
        print(f"{place}, {recipe.title}; {spent:.0f} minutes so far, about {recipe.minutes} for this", flush=True)
        try:
            run_one(name, request, jobs)
        except Exception as error:
            failed.append(name)
            print(f"{place} failed: {type(error).__name__}: {error}", flush=True)
    print(f"{(time.perf_counter() - began) / 60:.0f} minutes in all", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command resumes them")


if __name__ == "__main__":
    main()

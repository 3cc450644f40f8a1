"""Every table and figure of the paper by one command.

python -m experiments list                                # the recipes, and which were run
python -m experiments run table2                          # at a size for two cores
python -m experiments run table2 --jobs 2                 # in two processes of one thread each, which share the rows
python -m experiments run all                             # one after the other; finished ones are skipped
python -m experiments run table3 --size full --images IMAGENET --checkpoint resnet50.pt
python -m experiments plot table2                         # the picture and the table of the results

Existing results are not measured again, and the project's are committed: MFAC_RESULTS=FOLDER measures into a folder of
your own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.ledger import RESULTS, Ledger
from experiments.recipe import SIZES, SMOKE, Request
from experiments.recipes import RECIPES


def main(argv: list[str] | None = None) -> None:
    arguments = vars(parse(argv))
    what, name, jobs = arguments.pop("what"), arguments.pop("recipe", None), arguments.pop("jobs", 1)
    if what == "list":
        show()
        return
    arguments["folder"] = arguments["folder"] or (SMOKE if arguments["size"] == "smoke" else RESULTS)
    request = Request(**arguments)
    if what == "plot":
        print(RECIPES[name].plot(request))
    elif name == "all":
        run_all(request, jobs)
    else:
        run_one(name, request, jobs)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="what", required=True)
    verbs.add_parser("list", help="the recipes, and which were run")
    run = verbs.add_parser("run", help="run a recipe, or resume it")
    run.add_argument("recipe", choices=[*RECIPES, "all"])
    plot = verbs.add_parser("plot", help="draw the results")
    plot.add_argument("recipe", choices=list(RECIPES))
    for verb in (run, plot):
        verb.add_argument("--size", choices=SIZES, default="small")
        verb.add_argument("--folder", type=Path, help="of the results; default: MFAC_RESULTS, or experiments/results")
    run.add_argument("--only", default="", help="rows whose name contains this")
    run.add_argument("--jobs", type=int, default=1, help="processes of one thread each, which share the rows")
    run.add_argument("--shared", type=Path, help=argparse.SUPPRESS)  # tells such a process where rows are noted
    run.add_argument("--images", type=Path, help="ImageNet: a folder with train/CLASS and val/CLASS")
    run.add_argument("--checkpoint", type=Path, help="of a trained model, for sizes that start from one")
    return parser.parse_args(argv)


def finished(request: Request) -> Ledger:
    """The recipes that finished at a size, with command, environment and seconds."""
    return Ledger(f"runs_{request.size}", f"python -m experiments run all --size {request.size}", request.folder)


def run_one(name: str, request: Request, jobs: int = 1) -> None:
    """One recipe and its plot; noted as finished if all of it was asked for."""
    began = time.perf_counter()
    if jobs > 1:
        run_in_processes(name, request, jobs)
    RECIPES[name].run(request)
    if request.only or request.shared:
        return
    seconds = round(time.perf_counter() - began, 1)
    ledger = finished(request)
    ledger.cells.pop(name, None)
    command = f"python -m experiments run {name} --size {request.size}"
    ledger.cell(name, lambda: {"command": command, "environment": ledger.record["environment"],
                               "seconds_of_the_last_start": seconds})  # fmt: skip
    print(f"{name}: {RECIPES[name].plot(request)}, {seconds:.0f} s", flush=True)


def run_in_processes(name: str, request: Request, jobs: int) -> None:
    """Each row by the next free process, in one file of results; RuntimeError if a process failed."""
    given = {"--only": request.only, "--images": request.images, "--checkpoint": request.checkpoint}
    command = [sys.executable, "-m", "experiments", "run", name, "--size", request.size, "--folder", request.folder]
    command += [part for option, value in given.items() if value for part in (option, value)]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mfac-rows-") as shared:
        workers = [subprocess.Popen([*command, "--shared", shared], env=os.environ | one_thread) for _ in range(jobs)]
        try:
            codes = [worker.wait() for worker in workers]
        except BaseException:
            for worker in workers:
                worker.terminate()
                worker.wait()
            raise
    if any(codes):
        raise RuntimeError(f"a process that worked on {name} ended with {max(codes, key=abs)}; see its message above")


def run_all(request: Request, jobs: int = 1) -> None:
    """All recipes that have not finished; a failure does not stop the others."""
    began = time.perf_counter()
    failed = []
    for number, (name, recipe) in enumerate(RECIPES.items(), 1):
        place = f"{number} of {len(RECIPES)}: {name}"
        if name in finished(request).cells:
            print(f"{place}, done before: its results are in {request.folder}", flush=True)
            continue
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


def show() -> None:
    for name, recipe in RECIPES.items():
        sizes = [size for size in ("small", "full") if name in finished(Request(size)).cells]
        print(f"{name:18} {recipe.title}; small: {recipe.minutes} min; run here: {', '.join(sizes) or 'not yet'}")


if __name__ == "__main__":
    main()

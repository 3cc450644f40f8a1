"""The commands of `mfac`, and the application that they make up."""

import inspect
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mfac import __version__
from mfac.app import demo as tour
from mfac.app.cli.display import ProgressDisplay, show_run
from mfac.app.cli.options import PANEL, AsJson, Fresh, Out, TaskArgument, command, command_line, is_given, options
from mfac.app.plan import plan_pruning, plan_training
from mfac.app.report.page import write_page
from mfac.app.runs import training
from mfac.app.runs.environment import choose_device
from mfac.app.runs.folder import REPORT, RUN, inside, read_run
from mfac.app.runs.pruning import SCHEDULES, PruningSettings
from mfac.app.runs.run import run_task
from mfac.app.runs.training import KINDS, OPTIMIZERS, WINDOWS, OptimizerSettings, TrainingSettings
from mfac.app.tasks import Task, load_task, write_template
from mfac.pruning.options import FISHERS, METHODS, ORDERS, PRIORS, UPDATES, PruningOptions
from mfac.pruning.prune import prune as library_prune

WHAT, HOW, GRADUAL, OPTIMIZER, LENGTH = "What is pruned", "How it is chosen", "Gradual pruning", "Optimizers", "Length"
FOR_PRUNE, FOR_TRAIN = "For mfac prune", "For mfac train"
GRADUAL_RECOMPUTATIONS, COMPARED, WINDOWED = 4, ("full-matrix-adam", "adamw"), ("full-matrix-adam", "mfac")
Settings = PruningSettings | TrainingSettings

TASK_FILE, DEMO_FOLDER = Path("task.py"), Path("mfac-demo")
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

# The options of `mfac.prune` that are options of the command, too.
LIBRARY = options(
    library_prune,
    {WHAT: "pattern scope targets ignore",
     HOW: "recomputations num_grads block_size damping fisher update prior recalibrate refit order per_sample "
          "memory rows_dir"},
    recomputations={"default": None,
                    "show_default": f"{PruningOptions().recomputations}, or {GRADUAL_RECOMPUTATIONS} with --gradual"},
    update={"choices": UPDATES}, order={"choices": ORDERS}, fisher={"choices": FISHERS}, prior={"choices": PRIORS[1:]},
)  # fmt: skip
OWN = {WHAT: "sparsities", HOW: "methods", GRADUAL: "gradual steps schedule epochs lr momentum"}
FOR_BOTH = "save_every checkpoint device"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mfac {__version__}")
        raise typer.Exit


_version = typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")


@app.callback()
def overview(version: Annotated[bool, _version] = False) -> None:
    """Matrix-free second-order methods for PyTorch: prune and train models with the inverse Fisher matrix.

    \b
    First steps:
      mfac demo                                     a tour of one minute
      mfac prune digits --sparsity 0.9              prune the built-in example
      mfac train digits                             train it, with FullMatrixAdam and with AdamW
      mfac init task.py                             write a task file for your own model
    """


@command(
    *options(
        PruningSettings, OWN | {PANEL: f"{FOR_BOTH} seed"}, sparsities={"show_default": "0.9"}, seed={"min": 0},
        methods={"choices": METHODS}, schedule={"choices": tuple(SCHEDULES)},
    ),
    *LIBRARY,
)  # fmt: skip
def prune(
    ctx: typer.Context, task: TaskArgument, out: Out = None, fresh: Fresh = False, as_json: AsJson = False, **given: Any
) -> Any:
    """Prune a model: remove weights, update the remaining ones to compensate, and write weights, masks and a report.

    Several methods and sparsities make a table. The run is saved as it goes: after Ctrl-C or a crash, the same command
    resumes it, with exactly the same masks in the end.

    \b
    Examples:
      mfac prune digits --sparsity 0.8 --sparsity 0.9 --method mfac --method magnitude
      mfac prune task.py --checkpoint trained.pt --sparsity 0.9 --memory 4GB
      mfac prune task.py --pattern 2:4 --ignore re:head
      mfac prune task.py --sparsity 0.95 --gradual --steps 8 --epochs 2
    """
    if given["gradual"]:
        given.setdefault("recomputations", GRADUAL_RECOMPUTATIONS)
    library = PruningOptions(**{item.name: given.pop(item.name) for item in LIBRARY if item.name in given})
    return _run(ctx, load_task(task), PruningSettings(library, **given), out, fresh, as_json)


def _defaults(key: str) -> str:
    found = {name: OptimizerSettings(name).filled().get(key) for name in OPTIMIZERS}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value is not None) or "that of the weights"


def _by_name(key: str, given: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """{optimizer: value} of options such as `--lr 0.1` (for all) and `--lr sgd=0.1`."""
    values: dict[str, Any] = {}
    hint, kind = f"--{key.replace('_', '-')}", KINDS[key]
    for text in sorted(given, key=lambda text: "=" in text):  # values for all first: those by name override them
        name, _, value = text.rpartition("=")
        if name and name not in names:
            raise typer.BadParameter(f"{text!r}: {name} is not one of {', '.join(names)}", param_hint=hint)
        if not any(key in OptimizerSettings(one).filled() for one in ([name] if name else names)):
            raise typer.BadParameter(f"{text!r}: {name or ' and '.join(names)} has no such option", param_hint=hint)
        try:
            values |= dict.fromkeys([name] if name else names, kind(value))
        except ValueError:
            raise typer.BadParameter(f"{text!r}: {value!r} is not a number", param_hint=hint) from None
    return values


@command(
    *options(
        TrainingSettings,
        {OPTIMIZER: "optimizers schedule", LENGTH: "epochs steps eval_every", PANEL: f"{FOR_BOTH} seeds"},
        seeds={"min": 0}, optimizers={"kind": list[str], "default": COMPARED, "choices": OPTIMIZERS},
        schedule={"choices": training.SCHEDULES}, eval_every={"show_default": "an epoch, or a tenth of --steps"},
    ),
    *options(
        OptimizerSettings, {OPTIMIZER: " ".join(KINDS)},
        **{key: {"kind": list[str], "metavar": "VALUE|NAME=VALUE", "show_default": _defaults(key)} for key in KINDS},
    ),
)  # fmt: skip
def train(
    ctx: typer.Context, task: TaskArgument, out: Out = None, fresh: Fresh = False, as_json: AsJson = False, **given: Any
) -> Any:
    """Train a task with several optimizers side by side, from the same weights and with the same batches.

    The run is saved as it goes: after Ctrl-C or a crash, the same command resumes it, with exactly the same weights in
    the end.

    \b
    Examples:
      mfac train digits
      mfac train digits --optimizer full-matrix-adam --optimizer sgd --optimizer adam --seed 0 --seed 1
      mfac train task.py --optimizer full-matrix-adam --optimizer task --lr full-matrix-adam=1e-3 --epochs 20
    """
    names = given.pop("optimizers", COMPARED)
    own = {key: _by_name(key, given.pop(key, ()), names) for key in KINDS}
    each = ({key: values.get(name) for key, values in own.items()} for name in names)
    optimizers = tuple(OptimizerSettings(name, **one) for name, one in zip(names, each, strict=True))
    return _run(ctx, load_task(task), TrainingSettings(optimizers, **given), out, fresh, as_json)


def _run(ctx: typer.Context, task: Task, settings: Settings, out: Path | None, fresh: bool, as_json: bool) -> Any:
    """Runs, writes the report, and shows the results; an interruption says how to resume."""
    folder = out or Path("runs") / f"{task.name}-{settings.kind}"
    report = folder / REPORT
    try:
        with ProgressDisplay() as watcher:
            record = run_task(task, settings, folder, command=command_line(ctx), fresh=fresh, watcher=watcher)
    except KeyboardInterrupt as error:
        shown = ""
        if (folder / RUN).exists() and (so_far := read_run(folder))["cells"]:
            write_page([so_far], inside(folder, REPORT))
            shown = f" ({report})"
        raise type(error)(f"results so far are in {folder}{shown}; the same command resumes the run") from None
    write_page([record], inside(folder, REPORT))
    if as_json:
        return {**record, "folder": str(folder), "report": str(report)}
    if not watcher.is_used:
        typer.echo(f"{folder} is already finished; --fresh starts it over.")
    show_run(record)
    typer.echo(f"Report: {report}")
    return None


@command(
    *options(plan_pruning, {None: "num_grads"}),
    *options(library_prune, {FOR_PRUNE: "block_size recomputations targets ignore per_sample memory"}),
    *options(plan_pruning, {FOR_PRUNE: "sparsity on_disk"}),
    *options(OptimizerSettings, {FOR_TRAIN: "window"}, window={"choices": tuple(WINDOWS)}),
    *options(plan_training, {FOR_TRAIN: "optimizer momentum steps"}, optimizer={"choices": WINDOWED}),
    *options(PruningSettings, {PANEL: "device"}),
)
def plan(
    ctx: typer.Context,
    task: TaskArgument,
    for_training: Annotated[bool, typer.Option("--train", help="Plan `mfac train` instead of `mfac prune`.")] = False,
    as_json: AsJson = False,
    **given: Any,
) -> Any:
    """Estimate the memory of a run and the time of its gradients, before anything large is allocated.

    The time comes from a few real gradients on this machine. If the settings do not fit in memory, the output names
    some that do.

    \b
    Examples:
      mfac plan digits
      mfac plan task.py --num-grads 1024 --block-size none --on-disk
      mfac plan task.py --train --num-grads 1024 --window bfloat16
    """
    device = choose_device(given.pop("device"))
    if "window" in given:
        given["window"] = WINDOWS[given["window"]]
    estimate = plan_training if for_training else plan_pruning
    known = inspect.signature(estimate).parameters
    for key in given.keys() - known.keys():
        if is_given(ctx, key):
            which = "without" if for_training else "with"
            raise typer.BadParameter(f"applies only {which} --train", param_hint=f"--{key.replace('_', '-')}")
    figures = estimate(load_task(task), device, **{key: value for key, value in given.items() if key in known})
    return figures.as_dict() if as_json else typer.echo(figures.text())


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or run.json files.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path(REPORT),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a report.")] = False,
    as_json: AsJson = False,
) -> Any:
    """Make one self-contained HTML page from one or more runs.

    \b
    Examples:
      mfac report runs/digits-prune
      mfac report runs/digits-prune runs/digits-train --out both.html --title "Digits"
    """
    records = [read_run(run) for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(records, out, title, [run if run.is_dir() else run.parent for run in runs], force)
    return {"report": str(out), "runs": list(map(str, runs))} if as_json else typer.echo(f"Report: {out}")


@command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must end in .py.")] = TASK_FILE,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a complete task file, to edit for your own model and data.

    \b
    Examples:
      mfac init experiments/spiral.py
    """
    write_template(file, force)
    typer.echo(f"Wrote {file}. It works as it is: try `mfac prune {shlex.quote(str(file))}`, then make it yours.")


@command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the runs and the report.")] = DEMO_FOLDER,
) -> None:
    """Prune and train a small network on handwritten digits, with M-FAC and with the usual baselines.

    It takes about a minute, needs no download, and ends with two tables and a report.
    """
    with ProgressDisplay() as watcher:
        records = tour.run(out, watcher)
    for record in records:
        show_run(record)
        typer.echo("")
    tour.plot(records, out / "demo.png")
    page = (out / "report.html").resolve()
    folders = [out / record["kind"] for record in records]
    write_page(records, page, "mfac demo: handwritten digits, pruned and trained", folders)
    typer.echo(f"Report: {page}")


for function in (prune, train, plan, report, init, demo):
    app.command()(function)

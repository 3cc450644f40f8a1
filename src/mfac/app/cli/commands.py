"""The commands on a task: `mfac prune`, `mfac train` and `mfac plan`."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from mfac.app.cli.display import ProgressDisplay, show_run
from mfac.app.cli.options import PANEL, AsJson, Fresh, Out, TaskArgument, command, command_line, number_or_word, option
from mfac.app.plan import plan_pruning, plan_training
from mfac.app.report import write_page
from mfac.app.runs import training
from mfac.app.runs.environment import choose_device
from mfac.app.runs.folder import REPORT
from mfac.app.runs.format import RUN, inside, read_run
from mfac.app.runs.pruning import SCHEDULES, PruningSettings
from mfac.app.runs.run import run_task
from mfac.app.runs.training import DEFAULTS, OPTIMIZERS, WINDOWS, OptimizerSettings, TrainingSettings
from mfac.app.tasks import Task, load_task
from mfac.pruning.options import METHODS, ORDERS, SCOPES, UPDATES, PruningOptions
from mfac.pruning.prune import prune as library_prune

WHAT, HOW, GRADUAL, OPTIMIZER, LENGTH = "What is pruned", "How it is chosen", "Gradual pruning", "Optimizers", "Length"
FOR_PRUNE, FOR_TRAIN = "For mfac prune", "For mfac train"
GRADUAL_RECOMPUTATIONS, COMPARED, OURS = 4, ("mfac", "sgd"), DEFAULTS["mfac"]
NAMES = {"targets": "--target", "ignore": "--ignore"}
EACH = ("lr", "momentum", "weight_decay")  # given to all optimizers, or to one by name
Settings = PruningSettings | TrainingSettings

# The options of `mfac.prune` that are options of the command, too.
LIBRARY = (
    option(library_prune, "pattern", str, WHAT),
    option(library_prune, "scope", str, WHAT, choices=SCOPES),
    *(option(library_prune, name, list[str], WHAT, flag=flag) for name, flag in NAMES.items()),
    option(
        library_prune, "recomputations", int, HOW, default=None, min=1,
        show_default=f"{PruningOptions().recomputations}, or {GRADUAL_RECOMPUTATIONS} with --gradual",
    ),
    option(library_prune, "num_grads", int, HOW, min=1),
    option(library_prune, "block_size", str, HOW, callback=number_or_word),
    option(library_prune, "damping", str, HOW, callback=number_or_word),
    option(library_prune, "update", str, HOW, choices=UPDATES),
    option(library_prune, "order", str, HOW, choices=ORDERS),
    option(library_prune, "per_sample", bool, HOW),
    option(library_prune, "fisher", str, HOW, choices=("empirical", "sampled")),
    option(library_prune, "rows_dir", str, HOW, metavar="FOLDER"),
)  # fmt: skip


@command(
    option(PruningSettings, "sparsities", list[float], WHAT, flag="--sparsity", min=0, max=1, show_default="0.9"),
    *LIBRARY[:4],
    option(PruningSettings, "methods", list[str], HOW, flag="--method", choices=METHODS),
    *LIBRARY[4:],
    option(PruningSettings, "gradual", bool, GRADUAL),
    option(PruningSettings, "steps", int, GRADUAL, min=1),
    option(PruningSettings, "schedule", str, GRADUAL, choices=tuple(SCHEDULES)),
    option(PruningSettings, "epochs", int, GRADUAL, min=1),
    option(PruningSettings, "lr", float, GRADUAL, min=0),
    option(PruningSettings, "momentum", float, GRADUAL, min=0),
    option(PruningSettings, "checkpoint", str, PANEL, metavar="FILE"),
    option(PruningSettings, "seed", int, PANEL, min=0),
    option(PruningSettings, "device", str, PANEL),
    option(PruningSettings, "save_every", float, PANEL, min=0),
)
def prune(
    ctx: typer.Context, task: TaskArgument, out: Out = None, fresh: Fresh = False, as_json: AsJson = False, **given: Any
) -> Any:
    """Prune a model: remove weights, update the remaining ones to compensate, and write weights, masks and a report.

    Several methods and sparsities make a table. The run is saved as it goes: after Ctrl-C or a crash, the same command
    resumes it, with exactly the same masks in the end.

    \b
    Examples:
      mfac prune digits --sparsity 0.8 --sparsity 0.9 --method mfac --method magnitude
      mfac prune task.py --checkpoint trained.pt --sparsity 0.9 --damping auto
      mfac prune task.py --pattern 2:4 --ignore re:head
      mfac prune task.py --sparsity 0.95 --gradual --steps 8 --epochs 2
    """
    if given["gradual"]:
        given.setdefault("recomputations", GRADUAL_RECOMPUTATIONS)
    options = PruningOptions(**{item.name: given.pop(item.name) for item in LIBRARY if item.name in given})
    return _run(ctx, load_task(task), PruningSettings(options, **given), out, fresh, as_json)


def _defaults(key: str) -> str:
    return ", ".join(f"{name} {values[key]:g}" for name, values in DEFAULTS.items() if key in values)


def _by_name(key: str, given: tuple[str, ...], names: tuple[str, ...]) -> dict[str, float]:
    """{optimizer: value} of options such as `--lr 0.1` (for all) and `--lr sgd=0.1`."""
    values: dict[str, float] = {}
    hint = f"--{key.replace('_', '-')}"
    for text in sorted(given, key=lambda text: "=" in text):  # values for all first: those by name override them
        name, _, number = text.rpartition("=")
        if name and name not in names:
            raise typer.BadParameter(f"{text!r}: {name} is not one of {', '.join(names)}", param_hint=hint)
        try:
            values |= dict.fromkeys([name] if name else names, float(number))
        except ValueError:
            raise typer.BadParameter(f"{text!r}: {number!r} is not a number", param_hint=hint) from None
    return values


@command(
    option(
        TrainingSettings, "optimizers", list[str], OPTIMIZER, flag="--optimizer", default=COMPARED, choices=OPTIMIZERS
    ),
    *(
        option(OptimizerSettings, key, list[str], OPTIMIZER, metavar="VALUE|NAME=VALUE", show_default=_defaults(key))
        for key in EACH
    ),
    option(OptimizerSettings, "num_grads", int, OPTIMIZER, min=1, default=OURS["num_grads"]),
    option(OptimizerSettings, "damping", float, OPTIMIZER, min=0, default=OURS["damping"]),
    option(OptimizerSettings, "window", str, OPTIMIZER, choices=tuple(WINDOWS), default=OURS["window"]),
    option(TrainingSettings, "schedule", str, OPTIMIZER, choices=training.SCHEDULES),
    option(TrainingSettings, "epochs", int, LENGTH, min=1),
    option(TrainingSettings, "steps", int, LENGTH, min=1),
    option(TrainingSettings, "eval_every", int, LENGTH, min=1, show_default="an epoch, or a tenth of --steps"),
    option(TrainingSettings, "checkpoint", str, PANEL, metavar="FILE"),
    option(TrainingSettings, "seeds", list[int], PANEL, flag="--seed", min=0),
    option(TrainingSettings, "device", str, PANEL),
    option(TrainingSettings, "save_every", float, PANEL, min=0),
)
def train(
    ctx: typer.Context, task: TaskArgument, out: Out = None, fresh: Fresh = False, as_json: AsJson = False, **given: Any
) -> Any:
    """Train a task with several optimizers side by side, from the same weights and with the same batches.

    The run is saved as it goes: after Ctrl-C or a crash, the same command resumes it, with exactly the same weights in
    the end.

    \b
    Examples:
      mfac train digits
      mfac train digits --optimizer mfac --optimizer sgd --optimizer adam --seed 0 --seed 1
      mfac train task.py --optimizer mfac --optimizer task --lr mfac=1.0 --damping 0.05 --epochs 20
    """
    names = given.pop("optimizers", COMPARED)
    own: dict[str, Any] = {key: _by_name(key, given.pop(key, ()), names) for key in EACH}
    shared: dict[str, Any] = {key: given.pop(key) for key in ("num_grads", "damping", "window")}
    each = [shared | {key: own[key].get(name) for key in EACH} for name in names]
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
    option(plan_pruning, "num_grads", int, min=1),
    option(library_prune, "block_size", str, FOR_PRUNE, callback=number_or_word),
    option(library_prune, "recomputations", int, FOR_PRUNE, min=1),
    option(plan_pruning, "sparsity", float, FOR_PRUNE, min=0, max=1),
    *(option(library_prune, name, list[str], FOR_PRUNE, flag=flag) for name, flag in NAMES.items()),
    option(library_prune, "per_sample", bool, FOR_PRUNE),
    option(plan_pruning, "on_disk", bool, FOR_PRUNE),
    option(OptimizerSettings, "window", str, FOR_TRAIN, choices=tuple(WINDOWS), show_default="as the weights"),
    option(plan_training, "momentum", float, FOR_TRAIN, min=0),
    option(plan_training, "steps", int, FOR_TRAIN, min=1),
    option(PruningSettings, "device", str, PANEL),
)
def plan(
    task: TaskArgument,
    for_training: Annotated[
        bool, typer.Option("--train", help="Plan `mfac train` with the optimizer mfac, instead of `mfac prune`.")
    ] = False,
    as_json: AsJson = False,
    **given: Any,
) -> Any:
    """Estimate the memory and time of a run, before anything large is allocated.

    Times come from a few real gradients and short samples of the algebra on this machine. If the settings do not fit in
    memory, the output names some that do.

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
    arguments = {key: value for key, value in given.items() if key in inspect.signature(estimate).parameters}
    figures = estimate(load_task(task), device, **arguments)
    return figures.as_dict() if as_json else typer.echo(figures.text())

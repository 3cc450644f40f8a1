"""`mfac train`: a task by several optimizers side by side."""

from typing import Annotated

import typer

from mfac.app.cli import options
from mfac.app.cli.options import AsJson, Checkpoint, Device, Fresh, Out, SaveEvery, TaskArgument, complete, one_of
from mfac.app.cli.run_ending import carry_out
from mfac.app.runs.optimizers import DEFAULTS, OPTIMIZERS, WINDOWS, OptimizerSettings
from mfac.app.runs.training_run import SCHEDULES, TrainingSettings, run_training
from mfac.app.tasks import load_task

OPTIMIZER, LENGTH = "Optimizers", "How long"
EACH = "VALUE|NAME=VALUE"


def _by_name(option: str, given: list[str] | None, names: list[str]) -> dict[str, float]:
    """{optimizer: value} of options such as `--lr 0.1` (for all) and `--lr sgd=0.1`."""
    values: dict[str, float] = {}
    for text in sorted(given or (), key=lambda text: "=" in text):  # what is for all first, so that names win
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            raise typer.BadParameter(f"{text!r}: {number!r} is no number", param_hint=option) from None
        if name and name not in names:
            raise typer.BadParameter(f"{text!r}: {name} is none of {', '.join(names)}", param_hint=option)
        values |= dict.fromkeys([name] if name else names, value)
    return values


def _defaults(key: str) -> str:
    return ", ".join(f"{name} {values[key]:g}" for name, values in DEFAULTS.items() if key in values)


def train(
    ctx: typer.Context,
    task: TaskArgument,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(OPTIMIZERS)} (the task's own); may be repeated.",
            show_default="mfac, sgd",
            callback=one_of(OPTIMIZERS), autocompletion=complete(OPTIMIZERS), rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    lr: Annotated[
        list[str] | None,
        typer.Option(
            metavar=EACH, help="Learning rate; may be repeated.", show_default=_defaults("lr"),
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    momentum: Annotated[
        list[str] | None,
        typer.Option(
            metavar=EACH, help="Of mfac and sgd; may be repeated.", show_default=_defaults("momentum"),
            rich_help_panel=OPTIMIZER,
        ),
    ] = None,
    weight_decay: Annotated[
        list[str] | None,
        typer.Option(
            metavar=EACH, help="May be repeated.", show_default=_defaults("weight_decay"), rich_help_panel=OPTIMIZER
        ),
    ] = None,
    num_grads: Annotated[
        int, typer.Option(min=1, help="Gradients in the window of mfac.", rich_help_panel=OPTIMIZER)
    ] = int(DEFAULTS["mfac"]["num_grads"]),
    damping: Annotated[
        float, typer.Option(min=0, help="Of mfac, in the units of normalize=sum.", rich_help_panel=OPTIMIZER)
    ] = DEFAULTS["mfac"]["damping"],
    window: Annotated[
        str,
        typer.Option(
            help=f"How mfac stores its gradients: {', '.join(WINDOWS)} (1 % of each).",
            callback=one_of(tuple(WINDOWS)), autocompletion=complete(tuple(WINDOWS)), rich_help_panel=OPTIMIZER,
        ),
    ] = "float32",
    schedule: Annotated[
        str,
        typer.Option(
            help="Of the learning rate: cosine (to zero) or constant.",
            callback=one_of(SCHEDULES), autocompletion=complete(SCHEDULES), rich_help_panel=OPTIMIZER,
        ),
    ] = "cosine",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.", rich_help_panel=LENGTH)] = 5,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps, instead of epochs.", rich_help_panel=LENGTH)
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps between evaluations.", show_default="an epoch, or a tenth of --steps",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="Of weights and batches; may be repeated.", show_default="0",
            rich_help_panel=options.RUN_PANEL,
        ),
    ] = None,
    device: Device = "cpu",
    out: Out = None,
    fresh: Fresh = False,
    save_every: SaveEvery = 30.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a task by several optimizers side by side, from the same weights and with the same batches.

    Everything is saved as it goes: after Ctrl-C, or worse, the same command goes on where it stopped, and ends with
    the same weights as if nothing had happened.

    \b
    Examples:
      mfac train digits
      mfac train digits --optimizer mfac --optimizer sgd --optimizer adam --seed 0 --seed 1
      mfac train task.py --optimizer mfac --optimizer task --lr mfac=1.0 --damping 0.05 --epochs 20
    """
    loaded = load_task(task)
    folder = out or options.default_folder(loaded.name, "train")
    names = list(optimizer or ("mfac", "sgd"))
    rates, momenta = _by_name("--lr", lr, names), _by_name("--momentum", momentum, names)
    decays = _by_name("--weight-decay", weight_decay, names)
    settings = TrainingSettings(
        optimizers=tuple(
            OptimizerSettings(name, rates.get(name), momenta.get(name), decays.get(name), num_grads, damping, window)
            for name in names
        ),
        seeds=tuple(seed or (0,)),
        epochs=epochs,
        steps=steps,
        eval_every=eval_every,
        schedule=schedule,
        device=device,
        checkpoint=None if checkpoint is None else str(checkpoint),
        save_every=save_every,
    )
    command = options.command_line(ctx)
    carry_out(
        folder,
        lambda watcher: run_training(loaded, settings, folder, command=command, fresh=fresh, watcher=watcher),
        fresh=fresh,
        as_json=as_json,
    )

"""`mfac prune`: a task to one sparsity or several, by one method or several."""

from pathlib import Path
from typing import Annotated

import typer

from mfac.app.cli import options
from mfac.app.cli.options import AsJson, Checkpoint, Device, Fresh, Out, SaveEvery, TaskArgument, complete, one_of
from mfac.app.cli.run_ending import carry_out
from mfac.app.runs.pruning_run import run_pruning
from mfac.app.runs.pruning_settings import SCHEDULES, PruningSettings
from mfac.app.tasks import load_task
from mfac.pruning.options import METHODS, ORDERS, UPDATES

WHAT, HOW, GRADUAL = "What is pruned", "How it is chosen", "Gradual pruning"
SCOPES, FISHERS = ("global", "layer"), ("empirical", "sampled")
SPARSITY, RECOMPUTATIONS, GRADUAL_RECOMPUTATIONS = 0.9, 16, 4


def prune(
    ctx: typer.Context,
    task: TaskArgument,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="Fraction of weights to remove; may be repeated.",
            show_default=str(SPARSITY), rich_help_panel=WHAT,
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(help="2:4 (any N:M, which is a sparsity itself), row or channel.", rich_help_panel=WHAT),
    ] = None,
    scope: Annotated[
        str,
        typer.Option(
            help="global: all weights compete; layer: each tensor has the same sparsity.",
            callback=one_of(SCOPES), autocompletion=complete(SCOPES), rich_help_panel=WHAT,
        ),
    ] = "global",
    target: Annotated[
        list[str] | None,
        typer.Option(help="Name or re:PATTERN of weights to prune; may be repeated.", rich_help_panel=WHAT),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Name or re:PATTERN of weights to leave alone; may be repeated.", rich_help_panel=WHAT),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(METHODS)}; may be repeated.", show_default="mfac",
            callback=one_of(METHODS), autocompletion=complete(METHODS), rich_help_panel=HOW,
        ),
    ] = None,
    recomputations: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps on the way, each with new gradients.", rich_help_panel=HOW,
            show_default=f"{RECOMPUTATIONS}, or {GRADUAL_RECOMPUTATIONS} in each step of --gradual",
        ),
    ] = None,
    num_grads: Annotated[int, typer.Option(min=1, help="Gradients for each of them.", rich_help_panel=HOW)] = 64,
    block_size: Annotated[
        str, typer.Option(help="Weights in a block of the Fisher matrix; none: the full matrix.", rich_help_panel=HOW)
    ] = "128",
    damping: Annotated[str, typer.Option(help="A positive number, or auto.", rich_help_panel=HOW)] = "1e-5",
    update: Annotated[
        str,
        typer.Option(
            help="How the others make up for it: joint, obs or none.",
            callback=one_of(UPDATES), autocompletion=complete(UPDATES), rich_help_panel=HOW,
        ),
    ] = "joint",
    order: Annotated[
        str,
        typer.Option(
            help="scores, or greedy: one weight after the other.",
            callback=one_of(ORDERS), autocompletion=complete(ORDERS), rich_help_panel=HOW,
        ),
    ] = "scores",
    per_sample: Annotated[
        bool, typer.Option("--per-sample", help="One gradient a sample, not one a batch.", rich_help_panel=HOW)
    ] = False,
    fisher: Annotated[
        str,
        typer.Option(
            help="empirical: the labels of the data; sampled: drawn from the model.",
            callback=one_of(FISHERS), autocompletion=complete(FISHERS), rich_help_panel=HOW,
        ),
    ] = "empirical",
    rows_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where gradients go that do not fit in memory.", rich_help_panel=HOW),
    ] = None,
    gradual: Annotated[
        bool, typer.Option("--gradual", help="Train between pruning steps.", rich_help_panel=GRADUAL)
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Pruning steps on the way.", rich_help_panel=GRADUAL)] = 5,
    schedule: Annotated[
        str,
        typer.Option(
            help="How large they are: geometric (equal fractions of what is left) or polynomial.",
            callback=one_of(SCHEDULES), autocompletion=complete(SCHEDULES), rich_help_panel=GRADUAL,
        ),
    ] = "geometric",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of training after each.", rich_help_panel=GRADUAL)] = 1,
    lr: Annotated[
        float | None,
        typer.Option(
            min=0, help="Train by SGD at this learning rate.", rich_help_panel=GRADUAL,
            show_default="the task's own optimizer, or SGD at 0.01",
        ),
    ] = None,
    momentum: Annotated[float, typer.Option(min=0, help="Of that SGD.", rich_help_panel=GRADUAL)] = 0.9,
    checkpoint: Checkpoint = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.", rich_help_panel=options.RUN_PANEL)] = 0,
    device: Device = "cpu",
    out: Out = None,
    fresh: Fresh = False,
    save_every: SaveEvery = 30.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Prune a model to a sparsity, with what stays making up for what goes; write weights, masks and a compact file.

    Several methods and sparsities make a table. Everything is saved as it goes: after Ctrl-C, or worse, the same
    command goes on where it stopped, and ends with the same masks as if nothing had happened.

    \b
    Examples:
      mfac prune digits --sparsity 0.8 --sparsity 0.9 --method mfac --method magnitude
      mfac prune task.py --checkpoint trained.pt --sparsity 0.9 --damping auto
      mfac prune task.py --pattern 2:4 --ignore re:head
      mfac prune task.py --sparsity 0.95 --gradual --steps 8 --epochs 2
    """
    block, damped = options.parse_block_size(block_size), options.parse_damping(damping)
    loaded = load_task(task)
    folder = out or options.default_folder(loaded.name, "prune")
    usual = GRADUAL_RECOMPUTATIONS if gradual else RECOMPUTATIONS
    settings = PruningSettings(
        methods=tuple(method or ("mfac",)),
        sparsities=tuple(sparsity or (() if ":" in (pattern or "") else (SPARSITY,))),
        recomputations=usual if recomputations is None else recomputations,
        num_grads=num_grads,
        block_size=block,
        damping=damped,
        update=update,
        scope=scope,
        pattern=pattern,
        order=order,
        targets=tuple(target or ()),
        ignore=tuple(ignore or ()),
        per_sample=per_sample,
        fisher=fisher,
        gradual=gradual,
        schedule=schedule,
        steps=steps,
        epochs=epochs,
        lr=lr,
        momentum=momentum,
        seed=seed,
        device=device,
        checkpoint=None if checkpoint is None else str(checkpoint),
        rows_dir=None if rows_dir is None else str(rows_dir),
        save_every=save_every,
    )
    command = options.command_line(ctx)
    carry_out(
        folder,
        lambda watcher: run_pruning(loaded, settings, folder, command=command, fresh=fresh, watcher=watcher),
        fresh=fresh,
        as_json=as_json,
    )

"""`mfac plan`: memory and time before anything is allocated."""

import json
from typing import Annotated

import typer

from mfac.app.cli.options import AsJson, Device, TaskArgument, complete, one_of, parse_block_size
from mfac.app.plan import make_plan
from mfac.app.runs.device import choose_device
from mfac.app.runs.optimizers import WINDOWS
from mfac.app.tasks import load_task

PRUNE, TRAIN = "For mfac prune", "For mfac train"


def plan(
    task: TaskArgument,
    for_training: Annotated[
        bool, typer.Option("--train", help="Plan `mfac train` with its optimizer mfac, not `mfac prune`.")
    ] = False,
    num_grads: Annotated[
        int, typer.Option(min=1, help="Gradients for each recomputation of pruning, or in the window of training.")
    ] = 64,
    block_size: Annotated[
        str, typer.Option(help="Weights in a block of the Fisher matrix; none: the full matrix.", rich_help_panel=PRUNE)
    ] = "128",
    recomputations: Annotated[
        int, typer.Option(min=1, help="Steps on the way, each with new gradients.", rich_help_panel=PRUNE)
    ] = 16,
    sparsity: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of weights to remove.", rich_help_panel=PRUNE)
    ] = 0.9,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Name or re:PATTERN of weights to prune; may be repeated.", rich_help_panel=PRUNE),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Name or re:PATTERN of weights to leave alone; may be repeated.", rich_help_panel=PRUNE),
    ] = None,
    per_sample: Annotated[
        bool, typer.Option("--per-sample", help="One gradient a sample, not one a batch.", rich_help_panel=PRUNE)
    ] = False,
    on_disk: Annotated[
        bool, typer.Option("--on-disk", help="With gradients on disk (--rows-dir).", rich_help_panel=PRUNE)
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            help=f"How gradients are stored: {', '.join(WINDOWS)} (1 % of each).", show_default="as the weights",
            callback=one_of(tuple(WINDOWS)), autocompletion=complete(tuple(WINDOWS)), rich_help_panel=TRAIN,
        ),
    ] = None,
    momentum: Annotated[float, typer.Option(min=0, help="Of the optimizer.", rich_help_panel=TRAIN)] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.", rich_help_panel=TRAIN)] = 1000,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say how much memory and time a run will take, before anything large is allocated.

    Seconds come from a few real gradients and from short samples of the algebra on this machine. Where the settings do
    not fit in memory, others that do are named.

    \b
    Examples:
      mfac plan digits
      mfac plan task.py --num-grads 1024 --block-size none --on-disk
      mfac plan task.py --train --num-grads 1024 --window bfloat16
    """
    block, where = parse_block_size(block_size), choose_device(device)
    loaded = load_task(task)
    figures = make_plan(
        loaded,
        kind="train" if for_training else "prune",
        num_grads=num_grads,
        block_size=block,
        recomputations=recomputations,
        sparsity=sparsity,
        targets=target or None,
        ignore=ignore or None,
        per_sample=per_sample,
        on_disk=on_disk,
        window=None if window is None else WINDOWS[window],
        momentum=momentum,
        steps=steps,
        device=where,
    )
    typer.echo(json.dumps(figures.as_dict(), indent=1) if as_json else figures.text())

"""Options that several commands share, and how their texts become values."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mfac.app.tasks import BUILT_IN

RUN_PANEL, THIS_PANEL = "The run", "This command"


def _complete_task(incomplete: str) -> list[str]:
    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix == ".py"]
    return [name for name in BUILT_IN if name.startswith(incomplete)] + files


TaskArgument = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help=f"What to work on: {', '.join(BUILT_IN)}, a file of yours (task.py, see `mfac init`), or package.module.",
        autocompletion=_complete_task,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Where the run is kept.", show_default="runs/TASK-COMMAND", rich_help_panel=RUN_PANEL
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over, and drop what is in the folder.", rich_help_panel=RUN_PANEL)
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A state_dict by torch.save or safetensors to start from.", rich_help_panel=RUN_PANEL
    ),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1 ...", rich_help_panel=RUN_PANEL)]
SaveEvery = Annotated[
    float, typer.Option(min=0, help="Seconds between saves while training.", rich_help_panel=RUN_PANEL)
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.", rich_help_panel=THIS_PANEL),
]


def one_of(choices: Sequence[str]) -> Callable[[list[str] | str | None], list[str] | str | None]:
    """A check for an option of one value or several: all of them are among the choices."""

    def check(given: list[str] | str | None) -> list[str] | str | None:
        for value in [given] if isinstance(given, str) else given or ():
            if value not in choices:
                raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return given

    return check


def complete(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """What a shell offers for an option."""
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def parse_block_size(text: str) -> int | None:
    """A number of weights; None for "none"."""
    if text == "none":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number of weights nor none", param_hint="--block-size")
    return int(text)


def parse_damping(text: str) -> float | str:
    """A positive number, or "auto"."""
    if text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r} is neither a positive number nor auto", param_hint="--damping")
    return value


def default_folder(name: str, command: str) -> Path:
    """runs/TASK-COMMAND."""
    return Path("runs") / f"{name}-{command}"


def command_line(ctx: typer.Context) -> str:
    """The command as it can be given again: what was on the command line, but for how it is shown."""
    words = ["mfac", ctx.info_name or ""]
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if source is None or source.name != "COMMANDLINE" or param.name in ("as_json", "debug", "fresh"):
            continue
        value = ctx.params[param.name or ""]
        if param.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(param.opts[0] if value else param.secondary_opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [param.opts[0], str(item)]
    return shlex.join(words)

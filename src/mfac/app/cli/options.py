"""Options of the commands, made from the arguments that they set: name, default and help are written down once."""

import contextlib
import functools
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
        help=f"What to work on: {', '.join(BUILT_IN)}, a file (task.py, see `mfac init`) or a module (package.module).",
        autocompletion=_complete_task,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder of the run.", show_default="runs/TASK-COMMAND", rich_help_panel=RUN_PANEL
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over; what is in the folder is removed.", rich_help_panel=RUN_PANEL)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=THIS_PANEL)]


@dataclass(frozen=True)
class Option:
    """An option of a command, and how its text becomes a value."""

    parameter: inspect.Parameter
    flag: str
    choices: Sequence[str]
    parse: Callable[[str], Any] | None

    def value(self, given: Any) -> Any:
        items = given if isinstance(given, list) else [given]
        wrong = [item for item in items if self.choices and item is not None and item not in self.choices]
        if wrong:
            raise typer.BadParameter(f"{wrong[0]!r} is not one of {', '.join(self.choices)}", param_hint=self.flag)
        if self.parse is not None:
            return self.parse(given)
        return tuple(given) if isinstance(given, list) else given


@functools.cache
def described(source: Callable[..., Any]) -> dict[str, str]:
    """{argument: description}, from the Args section of a docstring."""
    section = (inspect.getdoc(source) or "").partition("Args:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def option(
    source: Callable[..., Any],
    name: str,
    kind: Any,
    panel: str | None = None,
    *,
    flag: str | None = None,
    choices: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    **more: Any,
) -> Option:
    """An option that sets an argument of `source`, a function or class, with the argument's default and description.

    `kind` is list[...] if the option may be repeated; `more` is for `typer.Option`, and may have another `default`.
    """
    default = more.pop("default", inspect.signature(source).parameters[name].default)
    text = described(source).get(name, "")
    text = text.removeprefix("None; ").replace("None:", "none:").removesuffix(".") + "."
    text = text if text[1:2] in (",", ";") else text[0].upper() + text[1:]  # symbols stay as they are
    if choices:
        more["autocompletion"] = lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
        more["metavar"] = "|".join(choices)
    if parse is not None:
        default = "none" if default is None else f"{default}"
    elif isinstance(default, tuple):
        more.setdefault("show_default", ", ".join(map(str, default)))
        default = None
    kind = kind | None if default is None else kind
    flag = flag or f"--{name.replace('_', '-')}"
    annotation = Annotated[kind, typer.Option(flag, help=text, rich_help_panel=panel, **more)]
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return Option(parameter, flag, choices, parse)


def with_options(*options: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options in the place of its `**given`. Options without a value are left out of `given`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*arguments: Any, **values: Any) -> None:
            for item in options:
                given = values.pop(item.parameter.name)
                if given is not None and given != []:
                    values[item.parameter.name] = item.value(given)
            command(*arguments, **values)

        own = [item.replace(kind=item.KEYWORD_ONLY) for item in inspect.signature(command).parameters.values()][:-1]
        own.sort(key=lambda item: item.default is not item.empty)
        count = sum(item.default is item.empty for item in own)
        return signed(run, [*own[:count], *(item.parameter for item in options), *own[count:]])

    return decorate


def signed(function: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """The function, with these parameters for Typer to see."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {item.name: item.annotation for item in parameters}
    return function


def number_or_word(text: str) -> int | float | str | None:
    """The number in the text, None for "none", or the text itself."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None if text == "none" else text


def command_line(ctx: typer.Context) -> str:
    """The command as it can be given again, without options that only change its output."""
    words = ["mfac", ctx.info_name or ""]
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if source is None or source.name != "COMMANDLINE" or param.name in ("as_json", "debug", "fresh"):
            continue
        value = ctx.params[param.name or ""]
        if param.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(param.opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [param.opts[0], str(item)]
    return shlex.join(words)

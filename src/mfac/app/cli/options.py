"""Commands whose options are made from the arguments that they set, and whose errors are one line."""

import contextlib
import errno
import functools
import inspect
import json
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from mfac.app.tasks import BUILT_IN, TaskError

FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
PANEL, THIS_PANEL = "The run", "This command"
METAVARS = {"checkpoint": "FILE", "rows_dir": "FOLDER"}


def _complete_task(incomplete: str) -> list[str]:
    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix == ".py"]
    return [name for name in BUILT_IN if name.startswith(incomplete)] + files


TASK_HELP = f"What to work on: {', '.join(BUILT_IN)}, a file (task.py, see `mfac init`) or a module (package.module)."
TaskArgument = Annotated[str, typer.Argument(metavar="TASK", help=TASK_HELP, autocompletion=_complete_task)]
_of_run = functools.partial(typer.Option, rich_help_panel=PANEL)
Out = Annotated[Path | None, _of_run(metavar="FOLDER", help="Folder of the run.", show_default="runs/TASK-COMMAND")]
Fresh = Annotated[bool, _of_run("--fresh", help="Start over, and remove the files of the earlier run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.", rich_help_panel=THIS_PANEL)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=THIS_PANEL)]


def options(source: Callable[..., Any], panels: Mapping[Any, str], **more: Any) -> list[inspect.Parameter]:
    """Options that set arguments of `source`, a function or class: {panel: "names of arguments"}.

    Types, defaults and descriptions are those of the arguments, from annotations and docstrings; `more` has settings of
    `typer.Option` by name, also a `default`, a `kind` or `choices`. A tuple or names make a repeatable option.
    """
    return [_option(source, name, panel, **more.get(name, {})) for panel in panels for name in panels[panel].split()]


def _option(source: Callable[..., Any], name: str, panel: str | None, **more: Any) -> inspect.Parameter:
    default = more.pop("default", inspect.signature(source).parameters[name].default)
    hint = get_type_hints(source, include_extras=True)[name]
    if get_origin(hint) is Annotated:
        hint, text = get_args(hint)
    else:
        text = described(source)[name]
    found = _kind(hint, default)
    kind = more.pop("kind", found)
    choices = more.pop("choices", get_args(hint) if get_origin(hint) is Literal else ())
    if choices:
        more["metavar"] = "|".join(choices)
        more["autocompletion"] = lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
        more["callback"] = lambda value: _one_of(choices, value)
    if kind is object:  # a number or a word
        default, kind, more["callback"] = f"{default}".lower(), str, number_or_word
    elif isinstance(default, tuple):
        more.setdefault("show_default", ", ".join(map(str, default)))
        default = None
    flag = re.sub("ies$", "y", name).removesuffix("s") if get_origin(found) is list else name
    text = " ".join(text.split()).removeprefix("None; ").replace("None:", "none:").removesuffix(".") + "."
    sentence = text if text[1:2] in (",", ";") else text[0].upper() + text[1:]  # symbols stay as they are
    more = {"help": sentence, "rich_help_panel": panel, "metavar": METAVARS.get(name), **more}
    settings = typer.Option(f"--{flag.replace('_', '-')}", **more)
    annotation = Annotated[kind | None if default is None else kind, settings]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(hint: Any, default: Any) -> Any:
    """bool, int, float or str; list[...] for several of them; object for a number or a word, which may be "none"."""
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    kinds = set(get_args(hint)) or {hint}
    if get_origin(hint) is Literal or not kinds & {int, float, bool}:
        return list[str] if any(get_origin(kind) is Iterable for kind in kinds) else str
    is_either = str in kinds or (NoneType in kinds and default is not None)
    return object if is_either else next(kind for kind in (float, int, bool) if kind in kinds)


@functools.cache
def described(source: Callable[..., Any]) -> dict[str, str]:
    """{argument: description}, from the Args section of a docstring."""
    section = (inspect.getdoc(source) or "").partition("Args:\n")[2].split("\n\n")[0]
    return dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE))


def _one_of(choices: Sequence[str], value: Any) -> Any:
    for item in value if isinstance(value, list) else [value]:
        if item is not None and item not in choices:
            raise typer.BadParameter(f"{item!r} is not one of {', '.join(choices)}")
    return value


def number_or_word(value: str) -> int | float | str:
    """The number or truth value in a text, or the text itself; for a callback of an option."""
    for kind in (int, float, {"true": True, "false": False}.__getitem__):
        with contextlib.suppress(ValueError, KeyError):
            return kind(value)
    return value


class Terminated(KeyboardInterrupt):
    """SIGTERM, for example of a batch system that stops a job; it ends a command as Ctrl-C does."""

    @classmethod
    def arrived(cls, *_: object) -> None:
        raise cls


def command(*given: inspect.Parameter) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Gives a function these options in place of its `**given`, and --debug; reports its errors in one line.

    Options without a value are left out of `given`; "none" is None unless it is a choice; lists are tuples. With --json
    the command returns the object to print, and anything else that is printed meanwhile goes to stderr.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(debug: bool, **values: Any) -> None:
            prints = contextlib.redirect_stdout(sys.stderr) if values.get("as_json") else contextlib.nullcontext()
            for item in given:
                value, settings = values.pop(item.name), item.annotation.__metadata__[0]
                if value == "none" and settings.callback is number_or_word:
                    values[item.name] = None
                elif value is not None and value != []:
                    values[item.name] = tuple(value) if isinstance(value, list) else value
            try:
                with prints:
                    answer = function(**values)
                if answer is not None:
                    typer.echo(json.dumps(answer, allow_nan=False))
            except KeyboardInterrupt as error:
                is_term = isinstance(error, Terminated)
                what, code = ("terminated", TERMINATED) if is_term else ("interrupted", INTERRUPTED)
                typer.echo(f"mfac: {what}{f'; {error}' if str(error) else ''}", err=True)
                raise typer.Exit(code) from None
            except Exception as error:
                if debug or isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
                    raise
                typer.echo(f"mfac: {explain(error)}", err=True)
                raise typer.Exit(FAILED) from None

        own = list(inspect.signature(function).parameters.values())
        own = [item.replace(kind=item.KEYWORD_ONLY) for item in own if item.kind is not item.VAR_KEYWORD]
        count = sum(item.default is item.empty for item in own)
        debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
        parameters = [*own[:count], *given, *own[count:], debug]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.__doc__ = re.sub(r"(?<=[^\n\b])\n(?=\S)", " ", inspect.getdoc(function) or "")  # wrapped by the terminal
        return run

    return decorate


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the user has given a value for this parameter."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def command_line(ctx: typer.Context) -> str:
    """The command as it can be given again, without options that only change its output."""
    words = ["mfac", ctx.info_name or ""]
    for param in ctx.command.params:
        value = ctx.params.get(param.name or "")
        if not is_given(ctx, param.name or "") or param.name in ("as_json", "debug", "fresh"):
            continue
        if param.param_type_name == "argument":
            words.append(str(value))
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [param.opts[0]] if isinstance(item, bool) else [param.opts[0], str(item)]
    return shlex.join(words)


KNOWN = (ValueError, OSError, ImportError, MemoryError, RuntimeError)
LIBRARIES = [Path(__file__).parents[2], *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))]


def explain(error: Exception) -> str:
    """What happened, where in the user's code, and what to do."""
    text = str(error) or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC:
            where = f" ({error.filename})" if error.filename else ""
            return f"the disk is full{where}; nothing is lost: free some space and run the same command again"
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text += "; change its permissions, or choose another place"
    place = None if isinstance(error, TaskError) else _place(error)
    text = " ".join(text.split()) + (f" ({place})" if place else "")
    return text if isinstance(error, KNOWN) else f"{type(error).__name__}: {text}; --debug shows the traceback"


def _place(error: Exception) -> str | None:
    """file:line of the last call in a file that belongs neither to this package, nor to Python, nor to a library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(folder in path.parents for folder in LIBRARIES):
            return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{frame.lineno}"
    return None

"""Errors as one line on stderr and an exit code: 1 for an error, 2 for wrong usage (Typer's), 130 for Ctrl-C."""

import errno
import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mfac.app.cli.options import THIS_PANEL, signed
from mfac.app.tasks import TaskError

FAILED, INTERRUPTED = 1, 130
KNOWN = (ValueError, OSError, ImportError, MemoryError, RuntimeError)
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=THIS_PANEL)]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its errors reported in one line, and with an option --debug that shows their tracebacks."""

    @functools.wraps(command)
    def run(*arguments: Any, debug: bool, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            typer.echo(f"mfac: interrupted{f'; {error}' if str(error) else ''}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if debug or isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
                raise
            typer.echo(f"mfac: {explain(error)}", err=True)
            raise typer.Exit(FAILED) from None

    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    return signed(run, [*inspect.signature(command).parameters.values(), debug])


def explain(error: Exception) -> str:
    """One line: what happened, where in the user's code, and what to do."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}; nothing is lost: free some space, and the same command resumes the run"
    text = str(error) or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    place = None if isinstance(error, TaskError) else _place(error)
    text = " ".join(text.split()) + (f" ({place})" if place else "")
    return text if isinstance(error, KNOWN) else f"{type(error).__name__}: {text}; --debug shows the traceback"


def _place(error: Exception) -> str | None:
    """file:line of the last call in a file that belongs neither to this package, nor to Python, nor to a library."""
    libraries = {
        Path(__file__).parents[2],
        *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")),
    }
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(folder in path.parents for folder in libraries):
            inside = path.is_relative_to(Path.cwd())
            return f"{path.relative_to(Path.cwd()) if inside else path}:{frame.lineno}"
    return None

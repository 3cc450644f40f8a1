"""What went wrong, in one line and an exit code: 1 for an error, 2 for wrong usage (Typer's), 130 for Ctrl-C."""

import errno
import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mfac.app.tasks import TaskError

FAILED, INTERRUPTED = 1, 130
KNOWN = (ValueError, OSError, ImportError, MemoryError, RuntimeError)
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the whole traceback of an error.", rich_help_panel="This command")
]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """The command with errors as one line on stderr and an exit code, and with `--debug`, which shows them whole."""

    @functools.wraps(command)
    def run(*arguments: Any, debug: bool, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            _tell(f"interrupted{f'; {error}' if str(error) else ''}")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if debug or isinstance(error, typer.Exit | typer.Abort | typer.BadParameter):
                raise
            _tell(explain(error))
            raise typer.Exit(FAILED) from None

    signature = inspect.signature(command)
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), debug])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "debug": Debug}
    return run


def explain(error: Exception) -> str:
    """One line: what happened, where in the user's own code if it was there, and what to do."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}; nothing that was there is lost: make room, and the same command goes on"
    text = " ".join(_text(error).split())
    place = None if isinstance(error, TaskError) else _place(error)
    text += f" ({place})" if place else ""
    return text if isinstance(error, KNOWN) else f"{type(error).__name__}: {text}; --debug shows the whole traceback"


def _tell(line: str) -> None:
    typer.echo(f"mfac: {line}", err=True)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or ("there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__)


def _place(error: Exception) -> str | None:
    """file:line of the last call in a file that is neither this package's, nor Python's, nor a library's."""
    own = Path(__file__).parents[2]
    libraries = {own, *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(folder in path.parents for folder in libraries):
            return f"{_shown(path)}:{frame.lineno}"
    return None


def _shown(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path

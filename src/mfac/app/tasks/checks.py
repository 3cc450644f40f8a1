"""Checks of a user's task. An error in its code becomes one line with the place in the user's file."""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.app.tasks.task import TaskError

# The functions of a task, and what each is called with.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "model": (),
    "train_batches": (),
    "loss": ("model", "batch"),
    "evaluate": ("model",),
    "eval_batches": (),
    "optimizer": ("parameters",),
    "pretrain": ("model",),
}
REQUIRED = ("model", "train_batches", "loss")
OPTIONS: dict[str, type] = {"measure": str, "higher_is_better": bool}


def check_members(members: Mapping[str, Any], path: Path) -> None:
    """Raises TaskError if a required function is missing, or if a name is bound to something else."""
    missing = [_call(name) for name in REQUIRED if members.get(name) is None]
    if missing:
        listed = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        raise TaskError(f"{path} must define {listed}; `mfac init FILE` writes a task file to start from")
    for name, arguments in FUNCTIONS.items():
        if members.get(name) is not None:
            _check_function(name, members[name], arguments, path)
    for name, kind in OPTIONS.items():
        if name in members and not isinstance(members[name], kind):
            raise TaskError(f"{path}: {name} must be a {kind.__name__}, not {members[name]!r}")


def guarded(function: Callable[..., Any], name: str, path: Path) -> Callable[..., Any]:
    """The function, with its errors and wrong results turned into TaskErrors; `loss` is returned as it is, for vmap."""
    if name == "loss":
        return function
    file, place = path.resolve(), _place(function, path)  # now: the current folder may change later

    @functools.wraps(function, updated=())
    def call(*arguments: Any) -> Any:
        with blaming(path, f"{name}()", file):
            result = function(*arguments)
        return _checked(result, name, place)

    return call


@contextmanager
def blaming(path: Path, what: str, file: Path | None = None) -> Iterator[None]:
    """Turns an error in the block into a TaskError that names the last line of the task's file it passed through."""
    file = file or path.resolve()
    try:
        yield
    except SyntaxError as error:
        raise TaskError(f"{error.filename or path}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, TaskError):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if _is_file(frame.filename, file)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        message = " ".join(str(error).split()) or "no message"
        raise TaskError(f"{place}: {what} failed: {type(error).__name__}: {message}") from error


def _call(name: str) -> str:
    return f"{name}({', '.join(FUNCTIONS[name])})"


def _check_function(name: str, function: Any, arguments: tuple[str, ...], path: Path) -> None:
    if isinstance(function, nn.Module) or not callable(function):
        hint = ""
        if name == "loss" and isinstance(function, nn.Module):
            hint = f"; for batches (inputs, targets) write loss = mfac.criterion_loss({type(function).__name__}())"
        raise TaskError(f"{path}: {name} must be a function {_call(name)}, not a {type(function).__name__}{hint}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TaskError(f"{_place(function, path)}: {name} must accept the call {_call(name)}: {error}") from None
    except ValueError:
        return  # a C function, whose arguments are unknown


def _checked(result: Any, name: str, place: str) -> Any:
    expected = None
    if name == "model" and not isinstance(result, nn.Module):
        expected = "a torch.nn.Module"
    elif name in ("train_batches", "eval_batches"):
        if isinstance(result, Mapping | Tensor | str | nn.Module) or not isinstance(result, Iterable):
            expected = "an iterable of batches"
    elif name == "optimizer" and not isinstance(result, Optimizer):
        expected = "a torch.optim.Optimizer"
    elif name == "evaluate":
        try:
            return float(result)
        except (TypeError, ValueError, RuntimeError):
            expected = "a number"
    if expected is not None:
        found = "None (is a `return` missing?)" if result is None else f"a {type(result).__name__}"
        raise TaskError(f"{place}: {_call(name)} must return {expected}, not {found}")
    return result


def _place(function: Any, path: Path) -> str:
    code: Any = getattr(inspect.unwrap(function), "__code__", None)
    is_there = code is not None and _is_file(code.co_filename, path.resolve())
    return f"{path}:{code.co_firstlineno}" if is_there else str(path)


def _is_file(filename: str, file: Path) -> bool:
    return Path(filename).resolve() == file

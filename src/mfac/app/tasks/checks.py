"""What a user's task must have, and errors in it as one line with the place in the user's own file."""

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

# Each function and what it is called with.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "model": (),
    "train_batches": (),
    "loss": ("model", "batch"),
    "evaluate": ("model",),
    "eval_batches": (),
    "optimizer": ("parameters",),
    "pretrain": ("model",),
}
NEEDED = ("model", "train_batches", "loss")
OPTIONS: dict[str, type] = {"measure": str, "higher_is_better": bool}


def check_members(members: Mapping[str, Any], path: Path) -> None:
    """Refuses a module that lacks a function, or has something else under its name.

    Raises:
        TaskError: what is missing or does not fit, all of it.
    """
    missing = [f"{name}({', '.join(FUNCTIONS[name])})" for name in NEEDED if members.get(name) is None]
    if missing:
        raise TaskError(f"{path} must define {_listed(missing)}; `mfac init FILE` writes a task to start from")
    for name, arguments in FUNCTIONS.items():
        if members.get(name) is not None:
            _check_function(name, members[name], arguments, path)
    for name, kind in OPTIONS.items():
        if name in members and not isinstance(members[name], kind):
            raise TaskError(f"{path}: {name} must be a {kind.__name__}, not {members[name]!r}")


def guarded(function: Callable[..., Any], name: str, path: Path) -> Callable[..., Any]:
    """The function, whose errors and wrong results are TaskErrors; `loss` is left as it is, for speed and for vmap."""
    if name == "loss":
        return function
    file, place = path.resolve(), _place(function, path)  # now: the current folder may be another one later

    @functools.wraps(function, updated=())
    def call(*arguments: Any) -> Any:
        with blaming(path, f"{name}()", file):
            result = function(*arguments)
        return _checked(result, name, place)

    return call


@contextmanager
def blaming(path: Path, what: str, file: Path | None = None) -> Iterator[None]:
    """Turns any error in the block into a TaskError that names the last line of the file that it went through.

    Args:
        path: the file, as the message has it.
        what: was being done.
        file: the same, resolved; None: `path` is good for that now.
    """
    file = file or path.resolve()
    try:
        yield
    except TaskError:  # says it all already
        raise
    except SyntaxError as error:
        raise TaskError(f"{error.filename or path}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if _is_file(frame.filename, file)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        message = " ".join(str(error).split()) or "no message"
        raise TaskError(f"{place}: {what} failed: {type(error).__name__}: {message}") from error


def _check_function(name: str, function: Any, arguments: tuple[str, ...], path: Path) -> None:
    shape = f"{name}({', '.join(arguments)})"
    if isinstance(function, nn.Module) or not callable(function):
        hint = ""
        if name == "loss" and isinstance(function, nn.Module):
            hint = f"; for batches (inputs, targets) write loss = mfac.criterion_loss({type(function).__name__}())"
        raise TaskError(f"{path}: {name} must be a function {shape}, not a {type(function).__name__}{hint}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TaskError(
            f"{_place(function, path)}: {name} is called as {shape}, which it does not take: {error}"
        ) from None
    except ValueError:
        return  # a function of C, whose arguments cannot be known


def _checked(result: Any, name: str, place: str) -> Any:
    """The result of a function, if it is what the function is for."""
    if name == "model" and not isinstance(result, nn.Module):
        raise TaskError(f"{place}: model() must return a torch.nn.Module, not {_described(result)}")
    if name in ("train_batches", "eval_batches") and (
        isinstance(result, Mapping | Tensor | str | nn.Module) or not isinstance(result, Iterable)
    ):
        raise TaskError(f"{place}: {name}() must return an iterable of batches, not {_described(result)}")
    if name == "optimizer" and not isinstance(result, Optimizer):
        raise TaskError(f"{place}: optimizer(parameters) must return a torch.optim.Optimizer, not {_described(result)}")
    if name == "evaluate":
        try:
            return float(result)
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(f"{place}: evaluate(model) must return a number, not {_described(result)}") from None
    return result


def _described(result: Any) -> str:
    return "None (is a `return` missing?)" if result is None else f"a {type(result).__name__}"


def _place(function: Any, path: Path) -> str:
    """file:line of a function that was written there, else the file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (
        f"{path}:{code.co_firstlineno}"
        if code is not None and _is_file(code.co_filename, path.resolve())
        else str(path)
    )


def _is_file(filename: str, file: Path) -> bool:
    return Path(filename).resolve() == file


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

"""Tasks, loaded and checked. An error in a user's code becomes one line with its place in the user's file."""

import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.saved import replacing


class TaskError(ValueError):
    """A task that cannot be used. The message is one line: where, what was expected, and what to do."""


@dataclass(frozen=True)
class Task:
    """A model and its data; docs/bring_your_own_model.md explains the functions.

    Random numbers (initial weights, the order of batches) come from the global random states, which a run seeds.
    """

    name: str
    model: Callable[[], nn.Module]
    train_batches: Callable[[], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], float] | None = None
    eval_batches: Callable[[], Iterable[Any]] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    measure: str = "accuracy"
    higher_is_better: bool = True
    source: str = ""  # the file or module that the task was loaded from, "" for a built-in task
    pretrain: Callable[[nn.Module], None] | None = None

    def scalar_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss; TaskError if it is not a scalar tensor."""
        found = self.loss(model, batch)
        if not isinstance(found, Tensor) or found.ndim:
            kind = f"one of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            problem = f"loss(model, batch) must return a scalar tensor, not {kind}"
            raise TaskError(f"{self.source or self.name}: {problem}; return the mean over the batch")
        return found


BUILT_IN = {"digits": "mfac.app.tasks.digits"}
# The functions of a task: what each is called with, the type that it returns, and the name of that type.
FUNCTIONS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "model": ((), nn.Module, "a torch.nn.Module"),
    "train_batches": ((), Iterable, "an iterable of batches"),
    "loss": (("model", "batch"), object, ""),
    "evaluate": (("model",), Real, "a number"),
    "eval_batches": ((), Iterable, "an iterable of batches"),
    "optimizer": (("parameters",), Optimizer, "a torch.optim.Optimizer"),
    "pretrain": (("model",), object, ""),
}
NO_BATCHES = (Mapping, Tensor, str, nn.Module)  # though they can be iterated over
REQUIRED = ("model", "train_batches", "loss")
OPTIONS: dict[str, type] = {"measure": str, "higher_is_better": bool}
KINDS = f"{', '.join(BUILT_IN)}, a file (task.py) or a module (package.module)"


def load_task(spec: str) -> Task:
    """The task of a built-in name, of a file that ends in .py, or of a module ("package.module")."""
    if spec in BUILT_IN:
        try:
            return _from_module(importlib.import_module(BUILT_IN[spec]), spec, "")
        except ModuleNotFoundError:
            raise TaskError(f"the task {spec} requires scikit-learn: pip install 'torch-mfac[demo]'") from None
    is_file = spec.endswith(".py") or "/" in spec or "\\" in spec
    folder = str(Path(spec).resolve().parent if is_file else Path.cwd())  # as for `python FILE` or `python -m MODULE`
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name, source = (Path(spec).stem, str(Path(spec))) if is_file else (spec, spec)
    return _from_module(_import_file(Path(spec)) if is_file else _import_module(spec), name, source)


def write_template(path: Path, force: bool = False) -> None:
    """Writes the task digits to a file that ends in .py, to be edited; `force` overwrites an existing file."""
    if path.suffix != ".py":
        raise ValueError(f"a task is a Python file: {path} should end in .py, for example task.py")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}; create it first, or choose another place")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; choose another name, or overwrite it with --force")
    text = Path(__file__).with_name("digits.py").read_text(encoding="utf-8")
    text = text.replace("from mfac.gradients import", "from mfac import")
    for command in ("plan", "prune", "train"):
        text = text.replace(f"mfac {command} digits", f"mfac {command} {shlex.quote(str(path))}", 1)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _import_file(path: Path) -> ModuleType:
    if path.is_dir() or path.suffix != ".py":
        raise TaskError(f"{path} is a folder or does not end in .py; a task is {KINDS}")
    if not path.exists():
        raise TaskError(f"there is no file {path}; `mfac init {shlex.quote(str(path))}` writes one to start from")
    loader = importlib.machinery.SourceFileLoader(f"mfac_task_{path.stem}", str(path.resolve()))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    sys.modules[loader.name] = module  # dataclasses and pickling look it up there
    with _blaming(path, path.resolve(), "importing it"):
        loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name) if all(map(str.isidentifier, name.split("."))) else None
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):  # something that a package imports
            raise TaskError(f"importing {name}: {error}") from error
        spec = None
    if spec is None or spec.origin is None:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TaskError(f"there is no task {name!r}; {hint}a task is {KINDS}")
    with _blaming(Path(spec.origin), Path(spec.origin), "importing it"):
        return importlib.import_module(name)


def _from_module(module: ModuleType, name: str, source: str) -> Task:
    """The task that a module defines, checked as far as possible without running it."""
    path = Path(source) if source.endswith(".py") else Path(module.__file__ or source)
    members = {key: value for key, value in vars(module).items() if value is not None}
    missing = [_call(key) for key in REQUIRED if key not in members]
    if missing:
        listed = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        raise TaskError(f"{path} must define {listed}; `mfac init FILE` writes a task file to start from")
    options = {key: members[key] for key in OPTIONS if key in members}
    for key, value in options.items():
        if not isinstance(value, OPTIONS[key]):
            raise TaskError(f"{path}: {key} must be a {OPTIONS[key].__name__}, not {value!r}")
    functions: dict[str, Any] = {key: _guarded(members[key], key, path) for key in FUNCTIONS if key in members}
    return Task(name=name, source=source, **functions, **options)


def _guarded(function: Any, name: str, path: Path) -> Any:
    """The function, with its errors and wrong results turned into TaskErrors; `loss` is returned as it is, for vmap."""
    if isinstance(function, nn.Module) or not callable(function):
        kind, hint = type(function).__name__, ""
        if name == "loss" and isinstance(function, nn.Module):
            hint = f"; for batches (inputs, targets) write loss = mfac.criterion_loss({kind}())"
        raise TaskError(f"{path}: {name} must be a function {_call(name)}, not a {kind}{hint}")
    (parameters, returned, expected), file = FUNCTIONS[name], path.resolve()  # the current folder may change
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{path}:{code.co_firstlineno}" if code and Path(code.co_filename).resolve() == file else str(path)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise TaskError(f"{place}: {name} must accept the call {_call(name)}: {error}") from None
    except ValueError:
        pass  # a C function, whose arguments are unknown

    @functools.wraps(function, updated=())
    def call(*arguments: Any) -> Any:
        with _blaming(path, file, f"{name}()"):
            result = function(*arguments)
        if returned is Real and isinstance(result, Tensor) and result.numel() == 1:
            result = result.item()
        if not isinstance(result, returned) or (returned is Iterable and isinstance(result, NO_BATCHES)):
            found = "None (is a `return` missing?)" if result is None else f"a {type(result).__name__}"
            raise TaskError(f"{place}: {_call(name)} must return {expected}, not {found}")
        return result

    return function if name == "loss" else call


@contextmanager
def _blaming(path: Path, file: Path, what: str) -> Iterator[None]:
    """Turns an error in the block into a TaskError that names the last line of the task's file it passed through."""
    folder = Path.cwd()
    try:
        yield
        if Path.cwd() != folder:
            raise TaskError(f"{path}: {what} changed the current folder; use Path(__file__).parent instead")
    except TaskError:
        raise
    except SyntaxError as error:
        raise TaskError(f"{error.filename or path}:{error.lineno}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        message = " ".join(str(error).split()) or "no message"
        raise TaskError(f"{place}: {what} failed: {type(error).__name__}: {message}") from error


def _call(name: str) -> str:
    return f"{name}({', '.join(FUNCTIONS[name][0])})"

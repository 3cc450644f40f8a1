"""Loads a task by name, file or module, and checks what can be checked without running it."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mfac.app.tasks import checks
from mfac.app.tasks.task import Task, TaskError

BUILT_IN = {"digits": "mfac.app.tasks.digits"}


def load_task(spec: str) -> Task:
    """The task of a built-in name, of a file that ends in .py, or of a module ("package.module").

    All three have the same functions (see `mfac init`). They are called later, when a command needs them; an error in
    any of them except `loss` becomes a TaskError with file and line.

    Raises:
        TaskError: there is no such task, its file has an error, or it lacks a required function.
    """
    if spec in BUILT_IN:
        return _from_module(importlib.import_module(BUILT_IN[spec]), spec, "")
    if spec.endswith(".py") or "/" in spec or "\\" in spec:
        return _from_module(_import_file(Path(spec)), Path(spec).stem, str(Path(spec)))
    return _from_module(_import_module(spec), spec, spec)


def _import_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise TaskError(f"{path} is a folder; a task is a file (see `mfac init task.py`) or a module (package.module)")
    if not path.exists():
        raise TaskError(f"there is no file {path}; `mfac init {path}` writes a task file to start from")
    if path.suffix != ".py":
        raise TaskError(f"{path} does not end in .py; a task is a Python file, a module or {_names()}")
    _search(path.resolve().parent)  # as for `python task.py`: the file can import its neighbours
    name = f"mfac_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look it up there
    with checks.blaming(path, "importing it"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise TaskError(_unknown(name))
    _search(Path.cwd())  # as for `python -m package.module`
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):  # something that a package imports
            raise TaskError(f"importing {name}: {error}") from error
        spec = None
    if spec is None or spec.origin is None:
        raise TaskError(_unknown(name))
    with checks.blaming(Path(spec.origin), "importing it"):
        return importlib.import_module(name)


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _from_module(module: ModuleType, name: str, source: str) -> Task:
    shown = Path(source) if source.endswith(".py") else Path(module.__file__ or source)
    members: dict[str, Any] = vars(module)
    checks.check_members(members, shown)
    functions: dict[str, Any] = {
        key: checks.guarded(members[key], key, shown) for key in checks.FUNCTIONS if members.get(key) is not None
    }
    return Task(
        name=name, source=source, **functions, **{key: members[key] for key in checks.OPTIONS if key in members}
    )


def _unknown(spec: str) -> str:
    close = difflib.get_close_matches(spec, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no task {spec!r}; {hint}a task is {_names()}, a file (task.py) or a module (package.module)"


def _names() -> str:
    return ", ".join(BUILT_IN)

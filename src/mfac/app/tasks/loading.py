"""A task by its name, its file or its module, checked as far as it can be without running it."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mfac.app.tasks import checks
from mfac.app.tasks.digits import digits
from mfac.app.tasks.task import Task, TaskError

BUILT_IN: dict[str, Callable[[], Task]] = {"digits": digits}


def load_task(spec: str) -> Task:
    """The task of a name that is built in, of a file that ends in .py, or of a module ("package.module").

    Nothing is downloaded or built yet; a user's functions are called when they are needed, and what goes wrong in
    `model` and the others (but `loss`, which is handed on as it is) is a TaskError with the file and the line.

    Raises:
        TaskError: there is no such task, its file has an error, or it lacks one of the functions.
    """
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if spec.endswith(".py") or "/" in spec or "\\" in spec:
        path = Path(spec)
        return _from_module(_import_file(path), path.stem, str(path))
    return _from_module(_import_module(spec), spec, spec)


def _import_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise TaskError(f"{path} is a folder; a task is a file (see `mfac init task.py`) or a module (package.module)")
    if not path.exists():
        raise TaskError(f"there is no file {path}; `mfac init {path}` writes one to start from")
    if path.suffix != ".py":
        raise TaskError(f"{path} does not end in .py; a task is a Python file, a module or {_names()}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as for `python task.py`: its neighbours can be imported, now and in its functions
        sys.path.insert(0, folder)
    name = f"mfac_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of what the file defines look it up there
    with checks.blaming(path, "importing it"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise TaskError(_unknown(name))
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:  # as for `python -m package.module`
        sys.path.insert(0, folder)
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # of the package that it would be in, or of something the package imports
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise TaskError(f"importing {name}: {error}") from error
        spec = None
    if spec is None or spec.origin is None:
        raise TaskError(_unknown(name))
    with checks.blaming(Path(spec.origin), "importing it"):
        return importlib.import_module(name)


def _from_module(module: ModuleType, name: str, source: str) -> Task:
    path = Path(module.__file__ or source)
    shown = Path(source) if source.endswith(".py") else path
    members: dict[str, Any] = vars(module)
    checks.check_members(members, shown)
    fields: dict[str, Any] = {
        key: checks.guarded(members[key], key, shown) for key in checks.FUNCTIONS if members.get(key) is not None
    }
    options = {key: members[key] for key in checks.OPTIONS if key in members}
    return Task(name=name, source=source, **fields, **options)


def _unknown(spec: str) -> str:
    close = difflib.get_close_matches(spec, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no task {spec!r}; {hint}a task is {_names()}, a file (task.py) or a module (package.module)"


def _names() -> str:
    return ", ".join(BUILT_IN)

"""The folder of a run: run.json, which is always complete, and a sub-folder per cell. One process at a time writes."""

import datetime
import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mfac.app.runs.files import writing

FORMAT = 1
RUN, REPORT, DENSE, LOCK, STATE = "run.json", "report.html", "dense.safetensors", ".lock", "state.pt"
PATHS = ("source", "checkpoint")  # files are compared by their digests, not by their paths
Record = dict[str, Any]


class RunFolder:
    """An open run; everything added is on disk when the call returns."""

    def __init__(self, path: Path, record: Record):
        self.path = path
        self.record = record

    def has(self, **facts: Any) -> bool:
        """Whether a cell with these entries is complete."""
        return any(facts.items() <= cell.items() for cell in self.record["cells"])

    def put(self, **entries: Any) -> None:
        record = {**self.record, **entries}
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        with writing(self.path / RUN) as draft:
            draft.write_text(text)
        self.record = record  # only now: memory is never ahead of the disk

    def add(self, cell: Record) -> None:
        self.put(cells=[*self.record["cells"], cell])

    def finish(self) -> None:
        self.put(finished=_now())


@contextmanager
def open_run(path: Path, description: Record, *, fresh: bool = False) -> Iterator[RunFolder]:
    """Opens the folder of a run, new or to be resumed, and locks it.

    `fresh` starts over; a run without any result is replaced in any case.

    Raises:
        ValueError: the folder belongs to another run or to something else, or another process is using it.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder (--out)")
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        before = read_run(path) if (path / RUN).exists() else None
        if before is None:
            _check_empty(path)
        elif not fresh and _facts(description) == _facts(before):
            yield RunFolder(path, before)
            return
        elif not fresh and (before["cells"] or any(path.glob(f"*/{STATE}"))):
            raise ValueError(_differences(path, _facts(before), _facts(description)))
        for file in (path / DENSE, *path.glob(f"*/{STATE}")):  # before the new record, which must not find them
            file.unlink(missing_ok=True)
        folder = RunFolder(path, {})
        folder.put(format=FORMAT, **description, started=_now(), finished=None, cells=[])
        _remove_results(path, before or {})
        yield folder


def read_run(path: Path) -> Record:
    """The record of a run, from its folder or from its run.json.

    Raises:
        ValueError: there is none, or it has another format.
    """
    file = path / RUN if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is not a run folder (it has no {RUN}); `mfac prune` and `mfac train` create one")
    try:
        record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from None
    found = record.get("format") if isinstance(record, dict) else type(record).__name__
    if found != FORMAT:
        raise ValueError(f"{file} has the format {found!r}; this version reads format {FORMAT}")
    return record


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one run from another."""
    found = {"the command": record["kind"]}
    for part, prefix in (("task", "task "), ("model", "model "), ("settings", ""), ("digests", "the content of ")):
        found |= {f"{prefix}{key}": value for key, value in record[part].items() if key not in PATHS}
    return found


def _differences(path: Path, old: dict[str, Any], new: dict[str, Any]) -> str:
    changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    found = [f"{name} was {_shown(old.get(name))} and is now {_shown(new.get(name))}" for name in changed[:3]]
    remedy = "choose another folder (--out), or start this one over (--fresh)"
    return f"{path} holds another run: {'; '.join(found)}; {remedy}"


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return (text if len(text) < 64 else text[:8]) or "none"  # a digest is shown by its first digits


def _check_empty(path: Path) -> None:
    others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK and not entry.name.endswith(".part"))
    if others:
        raise ValueError(f"{path} is not empty and not a run folder (it contains {others[0]}); choose another (--out)")


def _remove_results(path: Path, before: Record) -> None:
    """Removes the files of an earlier run's cells, and their folders if nothing else is in them."""
    (path / REPORT).unlink(missing_ok=True)
    files = [path / name for cell in before.get("cells", ()) for name in cell.get("files", {}).values()]
    files = [file for file in files if path in file.parents]
    for file in files:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in files} - {path}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that ends with the process, however that ends."""
    with open(path / LOCK, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another process is writing to {path}; wait for it, or choose another folder (--out)"
            raise ValueError(problem) from None
        yield

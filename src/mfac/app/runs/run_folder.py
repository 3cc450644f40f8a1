"""A run on disk: a folder with run.json, which is always whole, and one sub-folder for each cell."""

import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mfac.app.runs.writing import writing
from mfac.pruning.atomic_file import replacing

FORMAT = 1
RUN, REPORT, DENSE, LOCK, STATE = "run.json", "report.html", "dense.safetensors", ".lock", "state.pt"
WAYS_OUT = "choose another folder (--out), or start this one over (--fresh)"
PATHS = ("source", "checkpoint")  # a file is what is in it, by whatever path; `digests` has that
Record = dict[str, Any]


class RunFolder:
    """A run that is open for writing; `open_run` makes it. Whatever is added is on disk when the call returns."""

    def __init__(self, path: Path, record: Record):
        self.path = path
        self.record = record

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.record["finished"] is not None

    @property
    def identity(self) -> str:
        """What files of this run carry, so that those of an earlier one are not taken for its own."""
        return f"{self.record['fingerprint']} {self.record['started']}"

    def has(self, **facts: Any) -> bool:
        """Whether a cell with these entries is complete."""
        return any(all(cell.get(key) == value for key, value in facts.items()) for cell in self.record["cells"])

    def cell_folder(self, name: str) -> Path:
        """The folder of a cell, made if it is not there."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def put(self, key: str, value: Any) -> None:
        """Sets an entry of the record."""
        self._save({**self.record, key: value})

    def add(self, cell: Record) -> None:
        """A cell is complete."""
        self._save({**self.record, "cells": [*self.record["cells"], cell]})

    def finish(self) -> None:
        """All cells are complete."""
        self._save({**self.record, "finished": now()})

    def _save(self, record: Record) -> None:
        write_json(record, self.path / RUN)
        self.record = record  # only now: what is in memory is never ahead of the disk


@contextmanager
def open_run(path: Path, description: Record, *, fresh: bool = False) -> Iterator[RunFolder]:
    """Opens a folder for a run: makes it, or goes on with the one that is there, and keeps other processes out.

    Args:
        path: the folder.
        description: what `mfac.app.runs.description.describe` gives.
        fresh: start over, whatever run is there. (One that came to nothing is replaced in any case.)

    Raises:
        ValueError: the folder belongs to another run or to something else, or another process is writing to it.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a folder of its own: {WAYS_OUT.split(',')[0]}")
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        present = read_run(path) if (path / RUN).exists() else None
        if present is None:
            _check_empty(path)
        elif not fresh and _fingerprint(description) != present.get("fingerprint"):
            _check_nothing_is_lost(path, present, description)
            fresh = True
        if present is None or fresh:
            folder = RunFolder(path, {})
            _forget_state(path)
            folder._save(_new_record(description))
            _forget_results(path, present or {})
        else:
            folder = RunFolder(path, present)
        yield folder


def read_run(path: Path) -> Record:
    """The record of a run folder, or of a run.json itself.

    Raises:
        ValueError: there is none, or it is of another format.
    """
    file = path / RUN if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is no run folder: there is no {RUN} in it; `mfac prune` and `mfac train` make one")
    try:
        record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{file} has the format {found!r}; this version reads format {FORMAT}")
    return record


def write_json(value: Any, path: Path) -> None:
    """Writes JSON, in full or not at all."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    with writing(path), replacing(path) as draft:
        draft.write_text(text)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _new_record(description: Record) -> Record:
    rest = {key: value for key, value in description.items() if key != "digests"}
    return {
        "format": FORMAT,
        **rest,
        "digests": dict(description["digests"]),
        "fingerprint": _fingerprint(description),
        "started": now(),
        "finished": None,
        "cells": [],
    }


def _fingerprint(description: Mapping[str, Any]) -> str:
    parts = {key: description[key] for key in ("kind", "model", "digests")}
    for part in ("task", "settings"):
        parts[part] = {key: value for key, value in description[part].items() if key not in PATHS}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _check_nothing_is_lost(path: Path, present: Record, description: Record) -> None:
    """Refuses a folder of another run that has come to something, and says in what the two differ."""
    if not present["cells"] and not any(path.glob(f"*/{STATE}")):
        return
    differences = [
        f"{name} was {_shown(before)} and is now {_shown(after)}"
        for name, before, after in _pairs(present, description)
        if before != after
    ]
    raise ValueError(f"{path} is the folder of another run: {'; '.join(differences[:3])}; {WAYS_OUT}")


def _pairs(present: Record, description: Record) -> Iterator[tuple[str, Any, Any]]:
    yield "the command", present.get("kind"), description["kind"]
    for part, prefix in (("task", "task "), ("model", "model "), ("settings", "")):
        before, after = present.get(part, {}), description[part]
        for key in (key for key in {**after, **before} if key not in PATHS):
            yield f"{prefix}{key}", before.get(key), after.get(key)
    before, after = present.get("digests", {}), description["digests"]
    for key in {**after, **before}:
        yield f"the content of {key}", before.get(key, "")[:8], after.get(key, "")[:8]


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return text or "none"


def _check_empty(path: Path) -> None:
    others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK and not entry.name.endswith(".part"))
    if others:
        raise ValueError(
            f"{path} is not empty and no run folder ({others[0]} is in it, {RUN} is not); choose another with --out"
        )


def _forget_state(path: Path) -> None:
    """Takes away what a run would go on from, before the record of a new one is there."""
    for file in (path / DENSE, *path.glob(f"*/{STATE}")):
        file.unlink(missing_ok=True)


def _forget_results(path: Path, before: Record) -> None:
    """Takes away the files of the cells of an earlier run, and their folders unless something else is in them."""
    (path / REPORT).unlink(missing_ok=True)
    files = [path / name for cell in before.get("cells", ()) for name in cell.get("files", {}).values()]
    for file in files:
        if path in file.parents:
            file.unlink(missing_ok=True)
    for folder in {file.parent for file in files} - {path}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes out; the lock goes with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {path}; wait for it, or choose another folder (--out)"
            ) from None
        yield
    finally:
        os.close(handle)

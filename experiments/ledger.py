"""Results, saved cell by cell, so that an interrupted recipe continues with the missing cells.

The project's results are committed, so a command shows them without measuring anything. With the environment variable
MFAC_RESULTS=FOLDER it measures anew, into that folder.
"""

import datetime
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mfac.app.runs.environment import environment

RESULTS = Path(os.environ.get("MFAC_RESULTS") or Path(__file__).parent / "results")
IMAGES = Path(__file__).parent.parent / "docs" / "images"


class Ledger:
    """One JSON file of results: the command that makes it, the machine, and a cell for everything measured."""

    def __init__(self, name: str, command: str, folder: Path = RESULTS):
        self.path = folder / f"{name}.json"
        facts = {"date": datetime.date.today().isoformat(), **environment()}
        self.record: dict[str, Any] = {"command": command, "environment": facts, "cells": {}}
        self._own: dict[str, Any] = {}  # cells that this process has computed
        self._merge_saved()

    @property
    def cells(self) -> dict[str, Any]:
        return self.record["cells"]

    def cell(self, key: str, compute: Callable[[], Any]) -> Any:
        """What is saved under `key`, or the result of `compute`, saved at once."""
        found = self.cells.get(key)
        if found is None or (isinstance(found, dict) and found.get("partial")):
            print(f"{key} ...", flush=True)
            self.note(key, compute())
        return self.cells[key]

    def note(self, key: str, value: Any) -> None:
        """Saves a cell; one with `partial` is not finished, and `cell` computes it anew."""
        self._own[key] = value
        self._save()

    def _merge_saved(self) -> None:
        saved = json.loads(self.path.read_text())["cells"] if self.path.exists() else {}
        self.record["cells"] = saved | self._own

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(self.path.parent):
            self._merge_saved()  # cells that other processes have added meanwhile
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.record, indent=1, default=str) + "\n")
            os.replace(partial, self.path)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

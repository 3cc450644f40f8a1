"""Results, saved cell by cell, so that a recipe that was interrupted goes on with the cells that are missing.

Those of the project are committed, and so a command shows them and measures nothing. With MFAC_RESULTS=FOLDER in the
environment it measures anew, into that folder.
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


class Ledger:
    """One JSON file of results: the command that makes it, the machine, and a cell for each thing measured."""

    def __init__(self, name: str, command: str, folder: Path = RESULTS):
        self.path = folder / f"{name}.json"
        facts = {"date": datetime.date.today().isoformat(), **environment()}
        self.record: dict[str, Any] = {"command": command, "environment": facts, "cells": {}}
        self._take_saved()

    @property
    def cells(self) -> dict[str, Any]:
        return self.record["cells"]

    def cell(self, key: str, compute: Callable[[], Any]) -> Any:
        """What was saved under `key`, or else what `compute` gives, saved at once."""
        if key not in self.cells:
            print(f"{key} ...", flush=True)
            self.cells[key] = compute()
            self._save()
        return self.cells[key]

    def _take_saved(self) -> None:
        """Cells of the file, an earlier run's or those of one beside this."""
        if self.path.exists():
            self.record["cells"] = json.loads(self.path.read_text())["cells"] | self.cells

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(self.path.parent):
            self._take_saved()
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.record, indent=1) + "\n")
            os.replace(partial, self.path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Other processes wait: between reading a file and writing it anew, nobody else may add a cell."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

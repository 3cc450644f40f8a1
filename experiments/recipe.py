"""What a recipe is, what it is asked for, and how its results are kept."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.ledger import RESULTS, Ledger

SIZES = ("small", "smoke")
SMOKE = Path(__file__).parent.parent / "build" / "smoke"  # results without meaning, never committed


@dataclass(frozen=True)
class Request:
    size: str = "small"  # about 20 minutes on two cores; "smoke", for tests, takes seconds
    folder: Path = RESULTS
    only: str = ""  # rows whose name contains this
    shared: Path | None = None  # a folder in which processes that share a recipe note who does which row
    _mine: set[str] = field(default_factory=set, repr=False, compare=False)

    def wants(self, row: str) -> bool:
        """Whether a row is asked for, and no other process does it."""
        return self.only in row and (self.shared is None or row in self._mine or self._take(row))

    def _take(self, row: str) -> bool:
        assert self.shared is not None
        try:
            (self.shared / hashlib.sha256(row.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        self._mine.add(row)
        return True


class Results(Ledger):
    """The cells of one recipe at one size, each with the seconds that it took."""

    def __init__(self, name: str, command: str, request: Request):
        super().__init__(name, command, request.folder)
        self.picture = self.path.with_suffix(".png")
        self.wants = request.wants

    def row(self, key: str, compute: Callable[[], dict[str, Any]]) -> None:
        """A cell that is a row by itself."""
        if self.wants(key):
            self.cell(key, compute)

    def cell(self, key: str, compute: Callable[[], Any]) -> Any:
        return super().cell(key, lambda: _timed(compute))


@dataclass(frozen=True)
class Recipe:
    """One table or figure of the paper: `python -m experiments run NAME`."""

    name: str
    title: str
    measure: Callable[[Results, Any], None]  # of the results and the settings
    draw: Callable[[Results, Any], Path]  # -> the picture
    small: Any  # settings, an object with attributes
    smoke: Any
    minutes: int  # about what "small" takes on two cores
    file: str = ""  # of the results, if not NAME_SIZE
    command: str = ""  # likewise

    def run(self, request: Request) -> None:
        results, settings = self._open(request)
        results.record["settings"] = vars(settings)
        self.measure(results, settings)

    def plot(self, request: Request) -> Path:
        return self.draw(*self._open(request))

    def _open(self, request: Request) -> tuple[Results, Any]:
        command = self.command or f"python -m experiments run {self.name} --size {request.size}"
        results = Results(self.file or f"{self.name}_{request.size}", command, request)
        return results, self.smoke if request.size == "smoke" else self.small


def _timed(compute: Callable[[], Any]) -> Any:
    wall, processor = time.perf_counter(), time.process_time()
    cell = compute()
    if not isinstance(cell, dict):
        return cell
    return cell | {
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
    }

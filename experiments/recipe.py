"""What a recipe is, what it is asked for, and how its results are kept."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.ledger import RESULTS, Ledger

SIZES = ("full", "small", "smoke")
SMOKE = Path(__file__).parent.parent / "build" / "smoke"  # results of no meaning, which are never committed


@dataclass(frozen=True)
class Request:
    """A recipe at a size, and what only the person who asks can know.

    Args:
        size: "full" is the paper's, "small" takes two cores some 20 minutes, "smoke" seconds.
        folder: of the results.
        only: rows whose name has this in it.
        images: ImageNet, a folder with `train` and `val`.
        checkpoint: of a trained model.
        shared: a folder where processes that work on the same recipe note who does which row; None: alone.
    """

    size: str
    folder: Path = RESULTS
    only: str = ""
    images: Path | None = None
    checkpoint: Path | None = None
    shared: Path | None = None
    _mine: set[str] = field(default_factory=set, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, not {self.size!r}")

    def wants(self, row: str) -> bool:
        """Whether a row is asked for, and no other process has it."""
        return self.only in row and (self.shared is None or row in self._mine or self._take(row))

    def _take(self, row: str) -> bool:
        assert self.shared is not None
        try:
            (self.shared / hashlib.sha256(row.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        self._mine.add(row)
        return True

    def image_folder(self, split: str) -> Path:
        """`train` or `val` of ImageNet.

        Raises:
            ValueError: the folder was not given.
        """
        if self.images is None:
            raise ValueError("this size needs ImageNet: --images FOLDER, with FOLDER/train/CLASS and FOLDER/val/CLASS")
        return self.images / split

    def weights(self) -> Path:
        """The checkpoint's file.

        Raises:
            ValueError: it was not given.
        """
        if self.checkpoint is None:
            raise ValueError("this size starts from a trained model: --checkpoint FILE, a state dict as torch saves it")
        return self.checkpoint


@dataclass(frozen=True)
class Recipe:
    """One table or figure of the paper.

    Args:
        name: of the command `python -m experiments run NAME`.
        title: what it shows.
        run: does it, cell by cell, and goes on where it was interrupted; long ones are of rows that the request wants.
        plot: draws a file of results: (request) -> the picture.
        minutes: about what "small" takes on two cores.
    """

    name: str
    title: str
    run: Callable[[Request], None]
    plot: Callable[[Request], Path]
    minutes: int


class Results:
    """The cells of one recipe at one size, each with the seconds that it took."""

    def __init__(self, name: str, request: Request):
        request.folder.mkdir(parents=True, exist_ok=True)
        self.path = request.folder / f"{name}_{request.size}.json"
        command = f"python -m experiments run {name} --size {request.size}"
        self._ledger = Ledger(f"{name}_{request.size}", command, request.folder)

    @property
    def cells(self) -> dict[str, Any]:
        """What is there."""
        return self._ledger.cells

    def settings(self, **settings: Any) -> None:
        """Kept beside the cells."""
        self._ledger.record["settings"] = settings

    def cell(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was saved under `key`, or else what `compute` gives, saved at once with its seconds."""
        return self._ledger.cell(key, lambda: _timed(compute))

    def picture(self) -> Path:
        """Where the plot of this file goes."""
        return self.path.with_suffix(".png")


def run_module(module: str, *arguments: str) -> None:
    """`python -m experiments.MODULE ARGUMENTS`: a recipe with a command line of its own."""
    subprocess.run([sys.executable, "-m", f"experiments.{module}", *arguments], check=True)


def _timed(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    wall, processor = time.perf_counter(), time.process_time()
    cell = compute()
    return cell | {
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
    }

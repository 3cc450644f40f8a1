"""What a recipe is, what it is asked for, and how its results are kept."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.ledger import RESULTS, Ledger

SIZES = ("full", "small", "smoke")
SMOKE = Path(__file__).parent.parent / "build" / "smoke"  # results without meaning, never committed


@dataclass(frozen=True)
class Request:
    """A recipe at a size, and what only the user can know."""

    size: str  # "full" is the paper's, "small" takes about 20 minutes on two cores, "smoke" seconds
    folder: Path = RESULTS
    only: str = ""  # rows whose name contains this
    images: Path | None = None  # ImageNet, a folder with `train` and `val`
    checkpoint: Path | None = None  # of a trained model
    shared: Path | None = None  # a folder in which processes that share a recipe note who does which row
    _mine: set[str] = field(default_factory=set, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, not {self.size!r}")

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

    def image_folder(self, split: str) -> Path:
        if self.images is None:
            raise ValueError("this size needs ImageNet: --images FOLDER, with FOLDER/train/CLASS and FOLDER/val/CLASS")
        return self.images / split

    def weights(self) -> Path:
        if self.checkpoint is None:
            raise ValueError("this size starts from a trained model: --checkpoint FILE, a state dict as torch saves it")
        return self.checkpoint


@dataclass(frozen=True)
class Recipe:
    """One table or figure of the paper: `python -m experiments run NAME`."""

    name: str
    title: str
    run: Callable[[Request], None]
    plot: Callable[[Request], Path]  # -> the picture
    minutes: int  # about what "small" takes on two cores


class Results(Ledger):
    """The cells of one recipe at one size, each with the seconds that it took."""

    def __init__(self, name: str, request: Request):
        command = f"python -m experiments run {name} --size {request.size}"
        super().__init__(f"{name}_{request.size}", command, request.folder)
        self.picture = self.path.with_suffix(".png")

    def settings(self, **settings: Any) -> None:
        self.record["settings"] = settings

    def cell(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return super().cell(key, lambda: _timed(compute))


def _timed(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    wall, processor = time.perf_counter(), time.process_time()
    cell = compute()
    return cell | {
        "wall_seconds": round(time.perf_counter() - wall, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
    }

"""Cells of a grid, each measured in a process of its own: memory that is its own, an end to its time, and a journal."""

import ctypes
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Cell = dict  # task, method, d, m: what is to be measured
Result = dict  # outcome, and what was measured
PATIENCE = {"seconds": 0.4}  # how long an action is repeated
SLOW = 1.5  # seconds beyond which once is enough


@dataclass(frozen=True)
class Limits:
    """What a cell may take: bytes, and seconds of measuring and of getting ready."""

    bytes: int
    seconds: float
    preparation: float = 120.0


class Journal:
    """Results so far, a line each, so that a run that was stopped goes on with the next cell.

    A journal of another machine, version or limit is begun anew: figures of one run are compared with one another.
    """

    def __init__(self, path: Path, made_with: dict):
        self.path = path
        self.results: dict[str, Result] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and json.loads(lines[0]) == made_with:
            for line in lines[1:]:
                if line.endswith("}"):  # a line may be torn
                    self._take(json.loads(line))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made_with) + "\n")

    def _take(self, row: dict) -> None:
        self.results[name_of(row["cell"])] = row["result"]

    def add(self, cell: Cell, result: Result) -> None:
        row = {"cell": cell, "result": result}
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        self._take(row)


def name_of(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def run_cell(
    cell: Cell, measure: Callable, needs: Callable, limits: Limits, before: list[tuple[Cell, Result]]
) -> Result:
    """The cell's figures, or why there are none; nothing that does not fit is ever begun."""
    needed = needs(cell)
    if needed > limits.bytes:
        size = f"{needed / 1e9:,.0f} GB" if needed < 1e12 else f"{needed / 1e12:,.0f} TB"
        return {"outcome": "does not fit", "bytes_needed": needed, "why": f"does not fit: {size}"}
    slower = _slow_already(cell, before)
    if slower is not None:
        return {"outcome": "too slow", "why": f"too slow already at d = {slower['d']:,}, m = {slower['m']}"}
    return _in_process(cell, measure, limits)


def _slow_already(cell: Cell, before: list[tuple[Cell, Result]]) -> Cell | None:
    """A cell of the same method that is no larger and was stopped."""
    for other, result in before:
        same = (other["task"], other["method"]) == (cell["task"], cell["method"])
        smaller = other["d"] <= cell["d"] and (other["m"] or 0) <= (cell["m"] or 0)
        if same and smaller and result["outcome"] == "too slow" and "stopped" in result["why"]:
            return other
    return None


def _in_process(cell: Cell, measure: Callable, limits: Limits) -> Result:
    context = multiprocessing.get_context("fork")  # imports are done once; this process computes nothing itself
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(measure, cell, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return _listen(ours, process, limits)
    finally:
        process.kill()
        process.join()


def _listen(connection, process, limits: Limits) -> Result:
    """What the child says: that it is ready, what it has after a first round, all of it at the end."""
    deadline, preparing, first = time.monotonic() + limits.preparation, True, None
    while True:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            if first is not None:
                return first  # it was being repeated
            after = f"{limits.preparation:.0f} s, before it was ready" if preparing else f"{limits.seconds:g} s"
            return {"outcome": "too slow", "why": f"too slow: stopped after {after}"}
        try:
            kind, message = connection.recv()
        except EOFError:
            process.join()
            return {"outcome": "failed", "why": f"its process ended with {process.exitcode} (-9: out of memory)"}
        if kind == "end":
            return message
        if kind == "first":
            first = {"outcome": "measured", **message}
        else:
            deadline, preparing = time.monotonic() + limits.seconds, False


class Report:
    """Of a child to its parent, while it measures."""

    def __init__(self, connection):
        self._connection = connection

    def ready(self) -> None:
        """Everything that is given is there: the clock starts."""
        self._connection.send(("ready", None))

    def first(self, figures: Result) -> None:
        """Figures that stand if there is no time to repeat them."""
        self._connection.send(("first", figures))


def _child(measure: Callable, cell: Cell, connection) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out after all, it is this process that goes
    try:
        _warm_up()
        result = {"outcome": "measured", **measure(cell, Report(connection))}
    except Exception as error:
        result = {"outcome": "failed", "why": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    connection.send(("end", result))


def _warm_up() -> None:
    """What torch allocates once, by the first product, factor and derivative, is nobody's memory."""
    A = torch.randn(64, 64, requires_grad=True)
    for dtype in (torch.float32, torch.float64):
        (A.to(dtype) @ A.to(dtype)).sum().backward()
        B = A.detach().to(dtype)
        torch.linalg.eigh(torch.linalg.cholesky(B @ B.T + torch.eye(64, dtype=dtype)))


def resident(field: str = "VmRSS") -> int:
    """Bytes of memory that this process has now, without what was freed, which the system gets back first."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak() -> int:
    """The most that it had since `forget_peak`."""
    return resident("VmHWM")


def forget_peak() -> None:
    """From here on; what was freed on the way is given back to the system first."""
    resident()
    Path("/proc/self/clear_refs").write_text("5")


def best_of(action: Callable[[], object], seconds: float | None = None, rounds: int = 3) -> float:
    """The best time of an action: repeated until it has run so long and so often, or just once if it is slow."""
    patience = PATIENCE["seconds"] if seconds is None else seconds
    best, spent, count = math.inf, 0.0, 0
    while count == 0 or ((spent < patience or count < rounds) and best < SLOW):
        began = time.perf_counter()
        action()
        elapsed = time.perf_counter() - began
        best, spent, count = min(best, elapsed), spent + elapsed, count + 1
    return best

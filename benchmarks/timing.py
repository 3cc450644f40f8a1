"""Times as ratios in one run: callables take turns, the best of each counts; the machine's limits are measured too."""

import datetime
import gc
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from mfac import DynamicInverseFisher
from mfac.app.runs.environment import environment as machine

RESULTS = Path(__file__).parent / "results"


def timed(action: Callable[..., object], *arguments: object) -> float:
    """Seconds of a call: of the processor with one thread, which a busy machine disturbs least, else of the clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    action(*arguments)
    return clock() - began


def seconds(**candidates: Callable[[], object]) -> dict[str, float]:
    """The best time of each candidate; they take turns, so that a slow spell of the machine hits all of them.

    A candidate is repeated until it has run for a second or eight times, whichever comes later, but no more than three
    times after four seconds, and slow ones (over ten seconds) only once: against these, noise is small.
    """
    best: dict[str, float] = {}
    spent = dict.fromkeys(candidates, 0.0)
    rounds = dict.fromkeys(candidates, 0)
    gc.collect()
    while True:
        waiting = [name for name in candidates if not _enough(rounds[name], spent[name], best.get(name, 0.0))]
        if not waiting:
            return best
        for name in waiting:
            elapsed = timed(candidates[name])
            best[name] = min(best.get(name, elapsed), elapsed)
            spent[name] += elapsed
            rounds[name] += 1


def _enough(rounds: int, spent: float, best: float) -> bool:
    return (rounds >= 8 and spent >= 1) or (rounds >= 3 and spent >= 4) or best > 10


def unit_rows(m: int, d: int) -> torch.Tensor:
    """Random gradients of norm 1, the same in every run."""
    G = torch.randn(m, d, generator=torch.Generator().manual_seed(0))
    return G.div_(G.norm(dim=1, keepdim=True))


def fill(op: DynamicInverseFisher, gradients: Iterable[torch.Tensor]) -> None:
    """Fills a window without m passes: a few gradients over and over, and a Gram matrix of their squared norms alone.

    The time of a step depends on neither.
    """
    m, few = op.num_grads, [op._rows.encode(gradient) for gradient in gradients]
    for k in range(m):
        op._rows.write(k, few[k % len(few)])
    squares = op._ranks.sum_(torch.stack([stored.dense.double().square().sum() for stored in few]))
    op._inverse.K.copy_(squares.repeat(m)[:m].diag())
    op._inverse.size = m
    op._inverse.reset(m * op.damping)
    op._updates = m


def environment() -> dict[str, object]:
    """What the figures were measured on, and when."""
    return {"date": datetime.date.today().isoformat(), **machine()}


def save(name: str, command: str, rows: Iterable[dict[str, object]], folder: Path | None = RESULTS) -> None:
    """Writes NAME.json with the command and the environment; each row is shown as it comes. No folder: only shown."""
    record = {"command": command, "environment": environment(), "rows": [shown(row) for row in rows]}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def shown(row: dict[str, object]) -> dict[str, object]:
    """The same, after it was printed in one line for people; figures in parts have their own line in the file."""
    flat = {key: value for key, value in row.items() if not isinstance(value, dict)}
    figures = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in flat.items())
    print("  ".join(figures), flush=True)
    return row


def in_seconds(times: dict[str, float]) -> dict[str, float]:
    """{name_s: seconds}, as rows have them."""
    return {f"{name}_s": value for name, value in times.items()}

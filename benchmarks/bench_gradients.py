"""Rows per second of `collect_gradients` against a plain loop of `backward()` calls, and its peak memory.

    python benchmarks/bench_gradients.py                     # writes benchmarks/results/gradients.json
    python benchmarks/bench_gradients.py --rounds 1 --out /dev/null --only mlp

Speedups and overheads are ratios of times taken in turn in the same process, the median of some rounds. The plain loop
stores its rows too. Both write into memory that has been touched and zeroed before, outside the timed part: a page
fault costs anything from a tenth of a microsecond to four on virtual machines, the same for both, and would drown the
rest. `overhead` is the share of the
time that is neither forward nor backward, `overhead_but_storing` the share that is not writing the row either.
Threads are left to OMP_NUM_THREADS; the committed figures are for one.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from timing import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from mfac.gradients import collect_gradients, row_sinks
from mfac.gradients.batches import cut
from models import Case, bert, cross_entropy, resnet20

SAMPLES = 512
BATCH = 128
ROWS = 128


def lenet() -> Case:
    """An MLP for MNIST: LeNet-300-100."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    return Case(model, cross_entropy, (torch.randn(SAMPLES, 784), torch.randint(10, (SAMPLES,))))


def resnet() -> Case:
    torch.manual_seed(0)
    return Case(resnet20(), cross_entropy, (torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,))))


def bert_tiny() -> Case:
    """BERT-tiny (2 layers of 128, a vocabulary of 30,522) on sentences of 16 to 32 tokens."""
    case = bert(SAMPLES, tokens=32, vocab_size=30522, hidden_size=128, num_attention_heads=2, intermediate_size=512)
    lengths = torch.randint(16, 33, (SAMPLES, 1))
    case.batch["attention_mask"] = (torch.arange(32) < lengths).long()
    return case


CASES: dict[str, Callable[[], Case]] = {"mlp": lenet, "bert_tiny": bert_tiny, "resnet20": resnet}


def times(rounds: int, memory: Tensor, *functions: Callable[[], Any]) -> list[list[float]]:
    """Seconds, a list for each function: taken in turn, round by round, so that all see the same machine."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, seconds in zip(functions, taken, strict=True):
            memory.zero_()
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return taken


def ratio(above: list[float], below: list[float]) -> float:
    """The median over the rounds: what slows one round down slows both of its times."""
    return median(a / b for a, b in zip(above, below, strict=True))


def plain_loop(case: Case, batches: list[Any], rows: Tensor | None) -> None:
    """What one would write without the library."""
    model, parameters = case.model, list(case.model.parameters())
    for index, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        case.loss_fn(model, batch).backward()
        if rows is not None:
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters], out=rows[index]
            )


@contextmanager
def memory_touched_before(memory: Tensor) -> Iterator[None]:
    """Lets `collect_gradients` have its rows in this memory instead of fresh pages."""
    fresh = row_sinks._untouched_zeros
    row_sinks._untouched_zeros = lambda num_grads, *_: memory[:num_grads]
    try:
        yield
    finally:
        row_sinks._untouched_zeros = fresh


def measure(name: str, rounds: int) -> dict[str, Any]:
    case = CASES[name]()
    case.model.eval()
    repeats = 16 if name == "mlp" else 1  # enough rows for the time that a call takes besides
    batches = repeats * [cut(case.batch, i, i + BATCH) for i in range(0, SAMPLES, BATCH)]
    samples = [cut(case.batch, i, i + 1) for i in range(ROWS)]
    memory = torch.zeros(ROWS, sum(p.numel() for p in case.model.parameters()))

    def collect(**options: Any) -> Tensor:
        with memory_touched_before(memory):
            return collect_gradients(case.model, case.loss_fn, batches, **options)

    plain, bare, ours = times(
        rounds,
        memory,
        lambda: plain_loop(case, batches, memory),
        lambda: plain_loop(case, batches, None),
        lambda: collect(num_grads=len(batches)),
    )
    figures = {
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "batch": _figures(len(batches), plain, ours)
        | {
            "overhead": round(1 - ratio(bare, ours), 4),
            "overhead_but_storing": round(1 - ratio(plain, ours), 4),
        },
    }
    plain, ours, loop = times(
        rounds,
        memory,
        lambda: plain_loop(case, samples, memory),
        lambda: collect(num_grads=len(samples), per_sample=True),
        lambda: collect(num_grads=len(samples), per_sample=True, method="loop"),
    )
    figures["per_sample"] = _figures(len(samples), plain, ours) | {"loop_speedup": round(ratio(plain, loop), 2)}
    return figures


def _figures(rows: int, plain: list[float], ours: list[float]) -> dict[str, float]:
    return {
        "plain_rows_per_second": round(rows / min(plain), 1),
        "rows_per_second": round(rows / min(ours), 1),
        "speedup": round(ratio(plain, ours), 2),
    }


def measure_memory(per_sample: bool, rows: int = 128) -> dict[str, float]:
    """In this process, which must be a fresh one: how much the peak rises, over the size of the rows."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    case = Case(model, cross_entropy, (torch.randn(rows, 1000), torch.randint(10, (rows,))))
    batches = [cut(case.batch, i, i + 1) for i in range(rows)]
    plain_loop(case, batches[:2], None)
    collect_gradients(model, cross_entropy, [case.batch], 2, per_sample=True)
    before = _peak()
    grads = collect_gradients(
        model, cross_entropy, [case.batch] if per_sample else batches, rows, per_sample=per_sample
    )
    return {"rows_mib": round(grads.nbytes / 2**20, 1), "peak_rise_mib": round(_peak() - before, 1)}


def _peak() -> float:
    """MiB; not ru_maxrss, which a process inherits from the one that started it."""
    return next(int(line.split()[1]) / 1024 for line in _lines("/proc/self/status") if line.startswith("VmHWM"))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=CASES, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gradients.json")
    parser.add_argument("--memory", choices=["batch", "per_sample"], default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(measure_memory(arguments.memory == "per_sample")))
        return
    results: dict[str, Any] = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/bench_gradients.py",
        "environment": environment() | {"transformers": version("transformers")},
        "rounds": arguments.rounds,
    }
    for name in [arguments.only] if arguments.only else CASES:
        results[name] = measure(name, arguments.rounds)
        print(name, json.dumps(results[name], indent=2))
    results["peak_memory"] = {
        mode: json.loads(subprocess.check_output([sys.executable, __file__, "--memory", mode]))
        for mode in ("batch", "per_sample")
    }
    print("peak_memory", json.dumps(results["peak_memory"], indent=2))
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Rows per second of `collect_gradients` against a plain loop of `backward()` calls, and its peak memory.

    python benchmarks/bench_gradients.py                     # writes benchmarks/results/gradients.json
    python benchmarks/bench_gradients.py --rounds 1 --out /dev/null --only mlp

Times are taken in turn in the same process and the best of the rounds counts. With one thread they are processor time,
so that other processes count less; the committed figures are for one (OMP_NUM_THREADS=1).

Both sides are given the same batches, cut them into samples themselves, and store their rows, in memory that has been
touched and zeroed before, outside the timed part. Nor do they give memory back to the system in between. Both are about
page faults: they cost anything from a tenth of a microsecond to four on virtual machines, how many there are is decided
by the order of things on the heap, and they would drown the rest.

`overhead` is the share of the time of `collect_gradients` that is spent neither in the loss function (forward) nor in
`torch.autograd.grad` (backward), by clocks around the two; `overhead_but_storing` leaves out the writing of the row
too. Both are medians over the rounds. An MLP does a few operations a weight and sample, so its overhead is about that
of writing the row over the samples in a batch: it is measured for batches of three sizes.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
import warnings
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
from mfac.gradients import collect_gradients, per_sample, row_sinks
from mfac.gradients.batches import cut
from models import Case, bert, cross_entropy, resnet20

SAMPLES = 512
BATCH = 128


def lenet(samples: int = SAMPLES) -> Case:
    """An MLP for MNIST: LeNet-300-100."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    return Case(model, cross_entropy, (torch.randn(samples, 784), torch.randint(10, (samples,))))


def resnet() -> Case:
    torch.manual_seed(0)
    return Case(resnet20(), cross_entropy, (torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,))))


def bert_tiny() -> Case:
    """BERT-tiny (2 layers of 128, a vocabulary of 30,522) on sentences of 16 to 32 tokens."""
    case = bert(SAMPLES, tokens=32, vocab_size=30522, hidden_size=128, num_attention_heads=2, intermediate_size=512)
    lengths = torch.randint(16, 33, (SAMPLES, 1))
    case.batch["attention_mask"] = (torch.arange(32) < lengths).long()
    return case


class Reader(nn.Module):
    """An LSTM that reads an image of 28 x 28 line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(28, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm() -> Case:
    """A model that cannot be mapped."""
    torch.manual_seed(0)
    return Case(Reader(), cross_entropy, (torch.randn(SAMPLES, 28, 28), torch.randint(10, (SAMPLES,))))


CASES: dict[str, Callable[[], Case]] = {"mlp": lenet, "bert_tiny": bert_tiny, "resnet20": resnet, "lstm": lstm}
REPEATS = {"mlp": 64, "lstm": 4}  # of the batches: enough rows for the time that a call takes besides
SINGLES = {"mlp": 512, "lstm": 512}  # rows of a sample each, if not 128: those are over in a blink
LARGER_BATCHES = (512, 1024)  # of the MLP


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def times(rounds: int, memory: Tensor, *functions: Callable[[], Any]) -> list[list[float]]:
    """Seconds, a list for each function: taken in turn, round by round, so that all see the same machine."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, seconds in zip(functions, taken, strict=True):
            memory.zero_()
            start = clock()
            function()
            seconds.append(clock() - start)
    return taken


def plain_loop(case: Case, batches: list[Any], rows: Tensor | None, samples: int = 0) -> None:
    """What one would write without the library; with `samples`, that many rows of a sample each."""
    model, parameters = case.model, list(case.model.parameters())
    for index, batch in enumerate(_samples(batches, samples) if samples else batches):
        model.zero_grad(set_to_none=True)
        case.loss_fn(model, batch).backward()
        if rows is not None:
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters], out=rows[index]
            )


def _samples(batches: list[Any], count: int) -> Iterator[Any]:
    for i in range(count):
        batch, j = batches[i // BATCH], i % BATCH
        if isinstance(batch, tuple):
            yield tuple(tensor[j : j + 1] for tensor in batch)
        else:
            yield {key: tensor[j : j + 1] for key, tensor in batch.items()}


@contextmanager
def memory_touched_before(memory: Tensor) -> Iterator[None]:
    """Lets `collect_gradients` have its rows in this memory instead of fresh pages."""
    fresh = row_sinks._untouched_zeros
    row_sinks._untouched_zeros = lambda num_grads, *_: memory[:num_grads]
    try:
        yield
    finally:
        row_sinks._untouched_zeros = fresh


class Clocks:
    """Seconds spent in functions while `running`; a function is wrapped where it is looked up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        self.seconds.clear()
        grad, store = torch.autograd.grad, per_sample._store
        torch.autograd.grad, per_sample._store = self.timed("backward", grad), self.timed("storing", store)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds["all"] = time.perf_counter() - start
            torch.autograd.grad, per_sample._store = grad, store

    def share_outside(self, *names: str) -> float:
        return 1 - sum(self.seconds[name] for name in names) / self.seconds["all"]


def measure(name: str, rounds: int) -> dict[str, Any]:
    case = CASES[name]()
    case.model.eval()
    dim = sum(p.numel() for p in case.model.parameters())
    batches = [cut(case.batch, i, i + BATCH) for i in range(0, SAMPLES, BATCH)]
    found: dict[str, Any] = {
        "parameters": dim,
        "batch": measure_batches(case, REPEATS.get(name, 1) * batches, dim, rounds),
        "per_sample": measure_samples(case, batches, SINGLES.get(name, 128), dim, rounds),
    }
    for size in LARGER_BATCHES if name == "mlp" else ():
        found[f"batch of {size}"] = measure_batches(case, 64 * [lenet(size).batch], dim, rounds)
    return found


def measure_batches(case: Case, batches: list[Any], dim: int, rounds: int) -> dict[str, float]:
    memory = torch.zeros(len(batches), dim)
    clocks, overheads, but_storing = Clocks(), [], []
    loss_fn = clocks.timed("forward", case.loss_fn)

    def collect() -> None:
        with memory_touched_before(memory), clocks.running():
            collect_gradients(case.model, loss_fn, batches, len(batches))
        overheads.append(clocks.share_outside("forward", "backward"))
        but_storing.append(clocks.share_outside("forward", "backward", "storing"))

    plain, ours = times(rounds, memory, lambda: plain_loop(case, batches, memory), collect)
    return _figures(len(batches), plain, ours) | {
        "overhead": round(median(overheads), 4),
        "overhead_but_storing": round(median(but_storing), 4),
    }


def measure_samples(case: Case, batches: list[Any], samples: int, dim: int, rounds: int) -> dict[str, float]:
    memory = torch.zeros(samples, dim)

    def collect(**options: Any) -> None:
        with memory_touched_before(memory), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the LSTM cannot be mapped
            collect_gradients(case.model, case.loss_fn, batches, samples, per_sample=True, **options)

    plain, ours, loop = times(
        rounds,
        memory,
        lambda: plain_loop(case, batches, memory, samples),
        collect,
        lambda: collect(method="loop"),
    )
    return _figures(samples, plain, ours) | {"loop_speedup": round(min(plain) / min(loop), 2)}


def _figures(rows: int, plain: list[float], ours: list[float]) -> dict[str, float]:
    return {
        "plain_rows_per_second": round(rows / min(plain), 1),
        "rows_per_second": round(rows / min(ours), 1),
        "speedup": round(min(plain) / min(ours), 2),
    }


def keep_memory() -> None:
    """Tells malloc, where it is glibc's, to keep what is freed instead of giving it back to the system."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 * 2**20)
        mallopt(trim_threshold, 2**30)
        mallopt(top_pad, 64 * 2**20)


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
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=CASES, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gradients.json")
    parser.add_argument("--memory", choices=["batch", "per_sample"], default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(measure_memory(arguments.memory == "per_sample")))
        return
    keep_memory()
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

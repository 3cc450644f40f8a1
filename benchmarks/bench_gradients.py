"""Rows per second of `collect_gradients` against a plain loop of `backward()` calls, and its peak memory.

    python benchmarks/bench_gradients.py                     # writes benchmarks/results/gradients.json
    python benchmarks/bench_gradients.py --seconds 1 --out /dev/null --only mlp

What is compared is compared within one run: `collect_gradients` is given an iterable of batches that, before it hands
out some, lets the other side work on the same ones and takes that off the clock, as the speed of virtual machines
changes by several per cent from run to run. Figures are medians over all such pairs, or, per sample, over whole runs.
With one thread times are processor time; the committed figures are for one (OMP_NUM_THREADS=1).

All sides are given the same batches, cut them into samples themselves, and store their rows in memory which has been
touched and zeroed before, outside the timed part. Page faults would drown the rest.

`vmap_speedup` is that of plain `vmap(grad(...))` with `functional_call` over the plain loop; None where it cannot map
the model, as with BERT, which branches on padding.

`overhead` is the share of the time of `collect_gradients` that a loop of forward and backward passes, which stores
nothing, does not need; `plain_overhead` is that of the plain loop, which stores its rows and does nothing else.
"""

import argparse
import ctypes
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from peers.cells import peak
from timing import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from models import Case, bert, cross_entropy, resnet20

from mfac.gradients import collect, collect_gradients
from mfac.gradients.batches import cut, num_samples, with_sample_tensors
from mfac.gradients.collect import Method

SAMPLES = 512
BATCH = 128


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


class Reader(nn.Module):
    """An LSTM that reads an image of 28 x 28 line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(28, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm() -> Case:
    torch.manual_seed(0)
    return Case(Reader(), cross_entropy, (torch.randn(SAMPLES, 28, 28), torch.randint(10, (SAMPLES,))))


CASES: dict[str, Callable[[], Case]] = {"mlp": lenet, "bert_tiny": bert_tiny, "resnet20": resnet, "lstm": lstm}
REPEATS = {"mlp": 32, "lstm": 4}  # of the batches: enough rows for what a call takes besides
SINGLES = {"mlp": 512, "bert_tiny": 256, "lstm": 512}  # rows, if not 128
SLOW = ("bert_tiny", "resnet20")  # these are given twice the seconds
BLOCK = 8  # batches that are handed out at a time, at most: a quarter of them if they are few

Run = Callable[[Iterable[Any]], Any]


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Times(NamedTuple):
    """Seconds a batch, of what is measured and of what it is measured against."""

    run: float
    other: float


def side_by_side(run: Run, other: Run, batches: list[Any]) -> list[Times]:
    """Times both on the same batches, a block at a time: the other one first, while `run` waits for the block.

    What `run` takes before it asks for the first block is shared by all; what it takes at its end is in the last.
    """
    size = min(BLOCK, -(-len(batches) // 4))
    blocks = [batches[first : first + size] for first in range(0, len(batches), size)]
    asked, given = [], []

    def handed_out() -> Iterator[Any]:
        for block in blocks:
            asked.append(clock())
            other(block)
            given.append(clock())
            yield from block

    start = clock()
    run(handed_out())
    ends = [*asked[1:], clock()]
    before = (asked[0] - start) / len(batches)
    return [
        Times(before + (ends[i] - given[i]) / len(block), (given[i] - asked[i]) / len(block))
        for i, block in enumerate(blocks)
    ]


def whole(taken: list[Times]) -> list[Times]:
    """All blocks of a run as one: the first samples are not like the others, whose number is not yet planned."""
    return [Times(mean(times.run for times in taken), mean(times.other for times in taken))]


def rounds(budget: float, memory: Tensor, *measured: Callable[[], list[Times]]) -> list[list[Times]]:
    """Measures each of them again and again until the budget is spent; none always comes after the same other one."""
    for function in measured:
        function()  # what is made only once is not timed
    taken: list[list[Times]] = [[] for _ in measured]
    order, shuffle = list(range(len(measured))), random.Random(0).shuffle
    start = time.perf_counter()
    while not taken[0] or time.perf_counter() - start < budget:
        shuffle(order)
        for which in order:
            memory.zero_()
            taken[which] += measured[which]()
    return taken


def ratio(taken: list[Times]) -> float:
    """How many times as long the run takes as the other one."""
    return median(times.run / times.other for times in taken)


def plain_loop(case: Case, batches: Iterable[Any], rows: Tensor | None) -> None:
    """What one would write without the library."""
    model, parameters = case.model, list(case.model.parameters())
    for index, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        case.loss_fn(model, batch).backward()
        if rows is not None:
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters], out=rows[index]
            )
    model.zero_grad(set_to_none=True)


def plain_vmap(case: Case, batches: Iterable[Any], rows: Tensor, chunk: int = 32) -> None:
    """What one would write with torch.func."""
    loss = Loss(case)
    parameters = {name: parameter.detach() for name, parameter in loss.named_parameters()}

    def of_one(values: dict[str, Tensor], *leaves: Tensor) -> Tensor:
        return functional_call(loss, values, tuple(leaf.unsqueeze(0) for leaf in leaves))

    for batch in batches:
        leaves = list(batch if isinstance(batch, tuple) else batch.values())
        gradients = vmap(grad(of_one), (None, *[0] * len(leaves)), randomness="different")
        for start in range(0, len(leaves[0]), chunk):
            found = gradients(parameters, *(leaf[start : start + chunk] for leaf in leaves)).values()
            out = rows[start : min(start + chunk, len(leaves[0]))]
            torch.cat([value.flatten(1) for value in found], 1, out=out)


class Loss(nn.Module):
    """The loss as a function of the model's parameters and the tensors of a batch."""

    def __init__(self, case: Case):
        super().__init__()
        self.model, self.case = case.model, case

    def forward(self, *leaves: Tensor) -> Tensor:
        return self.case.loss_fn(self.model, with_sample_tensors(self.case.batch, leaves))


def samples_of(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for j in range(num_samples(batch, 0)):
            yield cut(batch, j, j + 1)


def row_memory(rows: int, dim: int) -> Tensor:
    """As `collect_gradients` would have it."""
    return collect.new_rows(rows, dim, torch.float32, torch.device("cpu"))


@contextmanager
def memory_touched_before(memory: Tensor) -> Iterator[None]:
    """Lets `collect_gradients` have its rows in this memory instead of fresh pages."""
    fresh = collect.new_rows
    collect.new_rows = lambda num_grads, *_: memory[:num_grads]
    try:
        yield
    finally:
        collect.new_rows = fresh


def measure(name: str, budget: float) -> dict[str, Any]:
    case = CASES[name]()
    case.model.eval()
    dim = sum(p.numel() for p in case.model.parameters())
    budget *= 1 + (name in SLOW)
    batches = [cut(case.batch, i, i + BATCH) for i in range(0, SAMPLES, BATCH)]
    repeated = REPEATS.get(name, 1) * batches
    return {
        "parameters": dim,
        "batch": measure_batches(case, repeated, dim, budget),
        "per_sample": measure_samples(case, SINGLES.get(name, BATCH), dim, budget),
    }


def measure_batches(case: Case, batches: list[Any], dim: int, budget: float) -> dict[str, float]:
    """Against the bare passes, which store nothing."""
    count = len(batches)
    memory = row_memory(count, dim)

    bare, plain = (partial(plain_loop, case, rows=rows) for rows in (None, memory))

    def collect(some: Iterable[Any]) -> None:
        collect_gradients(case.model, case.loss_fn, some, count)

    measured = [partial(side_by_side, run, bare, batches) for run in (plain, collect)]
    with memory_touched_before(memory):
        stored, ours = rounds(budget, memory, *measured)
    return {
        "plain_rows_per_second": round(1 / median(times.run for times in stored), 1),
        "rows_per_second": round(1 / median(times.run for times in ours), 1),
        "speedup": round(ratio(stored) / ratio(ours), 3),
        "overhead": round(1 - 1 / ratio(ours), 4),
        "plain_overhead": round(1 - 1 / ratio(stored), 4),
    }


def measure_samples(case: Case, count: int, dim: int, budget: float) -> dict[str, float]:
    """Against the plain loop, which stores its rows in memory of its own."""
    size = min(count, BATCH)
    batches = [cut(case.batch, i, i + size) for i in range(0, count, size)]
    memory, spare = row_memory(count, dim), torch.zeros(size, dim)
    mapped = partial(plain_vmap, case, rows=spare)

    def plain(some: Iterable[Any]) -> None:
        plain_loop(case, samples_of(some), spare)

    def collect(some: Iterable[Any], method: Method = "auto") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that recurrent layers cannot be mapped
            collect_gradients(case.model, case.loss_fn, some, count, per_sample=True, method=method)

    measured = [
        lambda: whole(side_by_side(collect, plain, batches)),
        lambda: whole(side_by_side(partial(collect, method="loop"), plain, batches)),
    ]
    with suppress(RuntimeError):
        mapped([cut(batches[0], 0, 2)])
        measured.append(lambda: whole(side_by_side(mapped, plain, batches)))
    with memory_touched_before(memory):
        ours, loop, *by_vmap = rounds(budget, memory, *measured)
    return {
        "plain_rows_per_second": round(size / median(times.other for times in ours), 1),
        "rows_per_second": round(size / median(times.run for times in ours), 1),
        "speedup": round(1 / ratio(ours), 3),
        "loop_speedup": round(1 / ratio(loop), 3),
        "vmap_speedup": round(1 / ratio(by_vmap[0]), 3) if by_vmap else None,
    }


def keep_memory() -> None:
    """Tells malloc, where it is glibc's, to keep what is freed instead of giving it back to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((-3, 32 * 2**20), (-1, 2**30), (-2, 64 * 2**20)):  # mmap threshold, trim, top padding
            mallopt(option, value)


def measure_memory(per_sample: bool, rows: int = 128) -> dict[str, float]:
    """In this process, which must be a fresh one: how much the peak rises, over the size of the rows."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    case = Case(model, cross_entropy, (torch.randn(rows, 1000), torch.randint(10, (rows,))))
    batches = [cut(case.batch, i, i + 1) for i in range(rows)]
    plain_loop(case, batches[:2], None)
    collect_gradients(model, cross_entropy, [case.batch], 2, per_sample=True)
    before = peak()
    grads = collect_gradients(
        model, cross_entropy, [case.batch] if per_sample else batches, rows, per_sample=per_sample
    )
    return {"rows_mib": round(grads.nbytes / 2**20, 1), "peak_rise_mib": round((peak() - before) / 2**20, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="for each row of figures")
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
        "seconds": arguments.seconds,
    }
    for name in [arguments.only] if arguments.only else CASES:
        results[name] = measure(name, arguments.seconds)
        print(name, json.dumps(results[name], indent=2))
    results["peak_memory"] = {
        mode: json.loads(subprocess.check_output([sys.executable, __file__, "--memory", mode]))
        for mode in ("batch", "per_sample")
    }
    print("peak_memory", json.dumps(results["peak_memory"], indent=2))
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

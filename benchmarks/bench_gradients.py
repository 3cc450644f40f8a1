"""Rows per second of `collect_gradients` against a plain loop of `backward()` calls, and its peak memory.

    OMP_NUM_THREADS=1 python benchmarks/bench_gradients.py                 # writes benchmarks/results/gradients.json
    OMP_NUM_THREADS=1 python benchmarks/bench_gradients.py --only mlp      # to look at

All are given the same batches, take turns, cut them into samples themselves, and store their rows in the same memory,
touched before: page faults would drown the rest. The best time of each counts. `sample_vmap_speedup` is that of plain
`vmap(grad(...))` over the plain loop; None where it cannot map the model, as with BERT, which branches on padding.
`overhead` is the share of the time that a loop of forward and backward passes, which stores nothing, does not need;
`plain_overhead` is that of the plain loop.
"""

import argparse
import json
import subprocess
import sys
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from peers.cells import peak
from timing import save, seconds, shown

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from models import Case, bert, cross_entropy

from experiments.models.resnet import ResNet
from mfac.gradients import collect, collect_gradients
from mfac.gradients.batches import cut, num_samples, with_sample_tensors

SAMPLES, BATCH = 512, 128
REPEATS = {"mlp": 32, "lstm": 4}  # of the batches: enough rows for what a call takes besides
SINGLES = {"mlp": 512, "bert_tiny": 256, "lstm": 512}  # rows, if not 128


def classifier(model, *shape):
    return Case(model, cross_entropy, (torch.randn(SAMPLES, *shape), torch.randint(10, (SAMPLES,))))


def lenet():
    """An MLP for MNIST: LeNet-300-100."""
    layers = nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    return classifier(nn.Sequential(*layers), 784)


def bert_tiny():
    """BERT-tiny (2 layers of 128, a vocabulary of 30,522) on sentences of 16 to 32 tokens."""
    case = bert(SAMPLES, tokens=32, vocab_size=30522, hidden_size=128, num_attention_heads=2, intermediate_size=512)
    case.batch["attention_mask"] = (torch.arange(32) < torch.randint(16, 33, (SAMPLES, 1))).long()
    return case


class LastLine(nn.Module):
    """Reads an image of 28 x 28 line by line."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(28, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


CASES = {"mlp": lenet, "bert_tiny": bert_tiny, "resnet20": lambda: classifier(ResNet(20), 3, 32, 32),
         "lstm": lambda: classifier(LastLine(), 28, 28)}  # fmt: skip


@contextmanager
def rows_in(memory):
    """Lets `collect_gradients` have its rows in this memory instead of fresh pages."""
    fresh, collect.new_rows = collect.new_rows, lambda *_: memory
    try:
        yield
    finally:
        collect.new_rows = fresh


def plain_loop(case, batches, rows):
    """What one would write without the library; None stores nothing."""
    model, parameters = case.model, list(case.model.parameters())
    for index, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        case.loss_fn(model, batch).backward()
        if rows is not None:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            torch.cat([gradient.flatten() for gradient in grads], out=rows[index])
    model.zero_grad(set_to_none=True)


class Loss(nn.Module):
    """The loss as a function of the model's parameters and the tensors of a batch."""

    def __init__(self, case):
        super().__init__()
        self.model, self.case = case.model, case

    def forward(self, *leaves):
        return self.case.loss_fn(self.model, with_sample_tensors(self.case.batch, leaves))


def plain_vmap(case, batches, rows, chunk=32):
    """What one would write with torch.func."""
    loss, done = Loss(case), 0
    parameters = {name: parameter.detach() for name, parameter in loss.named_parameters()}

    def of_one(values, *leaves):
        return functional_call(loss, values, tuple(leaf.unsqueeze(0) for leaf in leaves))

    for batch in batches:
        leaves = list(batch if isinstance(batch, tuple) else batch.values())
        gradients = vmap(grad(of_one), (None, *[0] * len(leaves)), randomness="different")
        for parts in zip(*(leaf.split(chunk) for leaf in leaves), strict=True):
            found = [value.flatten(1) for value in gradients(parameters, *parts).values()]
            torch.cat(found, 1, out=rows[done : done + len(parts[0])])
            done += len(parts[0])


def samples_of(batches):
    return [cut(batch, j, j + 1) for batch in batches for j in range(num_samples(batch, 0))]


def measure(name):
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.eval()
    dim, singles = sum(p.numel() for p in case.model.parameters()), SINGLES.get(name, BATCH)
    batches = [cut(case.batch, i, i + BATCH) for i in range(0, SAMPLES, BATCH)]
    whole = measure_batches(case, REPEATS.get(name, 1) * batches, dim)
    samples = measure_samples(case, batches[: singles // BATCH], torch.zeros(singles, dim))
    figures = {f"sample_{key}": value for key, value in samples.items()}
    return {"what": "rows", "model": name, "parameters": dim, **whole, **figures}


def measure_batches(case, batches, dim):
    count = len(batches)
    memory = torch.zeros(count, dim)
    with rows_in(memory):
        times = seconds(
            bare=lambda: plain_loop(case, batches, None),
            plain=lambda: plain_loop(case, batches, memory),
            ours=lambda: collect_gradients(case.model, case.loss_fn, batches, count),
        )
    return {
        "plain_rows_per_second": round(count / times["plain"], 1),
        "rows_per_second": round(count / times["ours"], 1),
        "speedup": round(times["plain"] / times["ours"], 3),
        "overhead": round(1 - times["bare"] / times["ours"], 4),
        "plain_overhead": round(1 - times["bare"] / times["plain"], 4),
    }


def measure_samples(case, batches, memory):
    count = len(memory)
    ours = partial(collect_gradients, case.model, case.loss_fn, batches, count, per_sample=True)
    candidates = {
        "plain": lambda: plain_loop(case, samples_of(batches), memory),
        "ours": ours,
        "loop": partial(ours, method="loop"),
    }
    with suppress(RuntimeError):
        plain_vmap(case, [cut(batches[0], 0, 2)], memory)
        candidates["vmap"] = lambda: plain_vmap(case, batches, memory)
    with warnings.catch_warnings(), rows_in(memory):
        warnings.simplefilter("ignore")  # that recurrent layers cannot be mapped
        times = seconds(**candidates)
    speedups = {way: round(times["plain"] / taken, 3) for way, taken in times.items()}
    return {
        "plain_rows_per_second": round(count / times["plain"], 1),
        "rows_per_second": round(count / times["ours"], 1),
        "speedup": speedups["ours"],
        "loop_speedup": speedups["loop"],
        "vmap_speedup": speedups.get("vmap"),
    }


def measure_memory(per_sample, rows=128):
    """In this process, which must be a fresh one: how much the peak rises, over the size of the rows."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    batch = torch.randn(rows, 1000), torch.randint(10, (rows,))
    batches = [batch] if per_sample else [cut(batch, i, i + 1) for i in range(rows)]
    collect_gradients(model, cross_entropy, [batch], 2, per_sample=True)
    before = peak()
    grads = collect_gradients(model, cross_entropy, batches, rows, per_sample=per_sample)
    return {"rows_mib": round(grads.nbytes / 2**20, 1), "peak_rise_mib": round((peak() - before) / 2**20, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one model; nothing is saved")
    parser.add_argument("--memory", choices=["batch", "per_sample"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(measure_memory(arguments.memory == "per_sample")))
        return
    if arguments.only:
        shown(measure(arguments.only))
    else:
        save("gradients", "OMP_NUM_THREADS=1 python benchmarks/bench_gradients.py", rows())


def rows():
    yield from map(measure, CASES)
    for mode in ("batch", "per_sample"):
        found = subprocess.check_output([sys.executable, __file__, "--memory", mode])
        yield {"what": "peak memory", "mode": mode, **json.loads(found)}


if __name__ == "__main__":
    main()

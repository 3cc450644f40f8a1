"""The optimizer's step: against SGD on the same training step, against the bare passes, and sparse against dense.

Batches and gradients are never used twice in a window: rows that repeat are another case, which bench_dynamic measures.
"""

import sys
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from pytorch_optimizer import SOAP, AdaHessian, Muon, Shampoo
from torch import nn

import mfac
from timing import in_seconds, save, seconds

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, the folder of experiments is not on the path
from experiments.models.minilm import minilm_encoder
from experiments.models.resnet import ResNet
from experiments.step_times import fill_window, step_of

BATCH, BATCHES = 128, 48


def muon(params):
    params = list(params)
    return Muon([{"params": [p for p in params if (p.ndim > 1) is use], "use_muon": use} for use in (True, False)])


CONTENDERS = {
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "FullMatrixAdam, m = 64": mfac.FullMatrixAdam,
    "FullMatrixAdam, orthogonalized": partial(mfac.FullMatrixAdam, orthogonalize=True),
    "FullMatrixAdam, bfloat16": partial(mfac.FullMatrixAdam, window=torch.bfloat16),
    "FullMatrixAdam, int8": partial(mfac.FullMatrixAdam, window=torch.int8),
    "M-FAC, m = 512": partial(mfac.MFAC, num_grads=512),
    "M-FAC, m = 1024": partial(mfac.MFAC, num_grads=1024),
    "Muon": muon,
    "SOAP": SOAP,
    "Shampoo": Shampoo,
    "AdaHessian": AdaHessian,
}


def training_step(make, batches, memory_format):
    torch.manual_seed(0)
    model = ResNet(20, projection=False).to(memory_format=memory_format)
    step = step_of(model, make(model.parameters()), batches)
    step()
    return step


def overhead(memory_format, contenders):
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(BATCH, 3, 32, 32, generator=generator) for _ in range(BATCHES)]
    labels = torch.randint(10, (BATCHES, BATCH), generator=generator)
    batches = [(some.contiguous(memory_format=memory_format), of) for some, of in zip(images, labels, strict=True)]
    steps = {name: training_step(CONTENDERS[name], batches, memory_format) for name in contenders}
    times = seconds(**steps)
    for name, value in times.items():
        yield {
            "what": "training step of ResNet20, batch 128", "format": str(memory_format).removeprefix("torch."),
            "optimizer": name, "seconds": value, "over_sgd": value / times["SGD, momentum"],
        }  # fmt: skip


class Logits(nn.Module):
    """MiniLM with a classifier, embeddings frozen; its logits, for batches of 32 sentences of 64 tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = minilm_encoder(), nn.Linear(384, 2)

    def forward(self, tokens):
        return self.head(self.encoder(tokens).last_hidden_state.mean(1))


def fine_tuning():
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randint(30_000, (32, 64), generator=generator), torch.arange(32) % 2) for _ in range(8)]
    steps = {name: step_of(model := Logits(), make(model.parameters()), batches) for name, make in CONTENDERS.items()
             if name == "AdamW" or "FullMatrixAdam" in name}  # fmt: skip
    times = seconds(**steps)
    for name, value in times.items():
        yield {"what": "training step of MiniLM, 32 sentences", "optimizer": name, "seconds": value,
               "over_adamw": value / times["AdamW"]}  # fmt: skip


def tensors(weights, count):
    """`count` tensors of two dimensions with `weights` numbers in all, as a network has them."""
    torch.manual_seed(0)
    width = weights // count // 100
    return nn.ParameterList([nn.Parameter(torch.randn(100, width) * 0.1) for _ in range(count)])


def bare_step(weights, count, m):
    model = tensors(weights, count)
    optimizer = mfac.MFAC(model.parameters(), 1e-6, m)
    fill_window(optimizer, model)
    # A lap of the window where that is small, and more than there are rounds where it is not.
    source = cycle([[torch.randn_like(p) * 1e-3 for p in model] for _ in range(m + 1 if weights < 10**5 else 32)])

    def step():
        for p, g in zip(model, next(source), strict=True):
            p.grad = g
        optimizer.step()

    G, g, c = optimizer._window.operator.rows, torch.randn(sum(p.numel() for p in model)), torch.randn(m)
    times = seconds(ours=step, two_passes=lambda: (G @ g, c @ G))
    return {
        "what": "step", "d": len(g), "tensors": count, "m": m, **in_seconds(times),
        "of_two_bare_passes": times["ours"] / times["two_passes"],
        "beyond_them_ms": 1e3 * (times["ours"] - times["two_passes"]),
    }  # fmt: skip


def sparse_step(weights=270_000, count=20, m=512, density=0.1):
    dense, sparse = tensors(weights, count), tensors(weights, count)
    generator = torch.Generator().manual_seed(0)
    masks = {p: torch.rand(p.shape, generator=generator) < density for p in sparse}
    for p, mask in masks.items():
        p.data *= mask
    optimizers = [mfac.MFAC(dense.parameters(), 1e-6, m), mfac.MFAC(sparse.parameters(), 1e-6, m, masks=masks)]
    for optimizer, model in zip(optimizers, (dense, sparse), strict=True):
        fill_window(optimizer, model)
    gradients = cycle([[torch.randn_like(p) * 1e-3 for p in dense] for _ in range(256)])

    def step(optimizer, model):
        for p, g in zip(model, next(gradients), strict=True):
            p.grad = g
        optimizer.step()

    times = seconds(dense=partial(step, optimizers[0], dense), sparse=partial(step, optimizers[1], sparse))
    bytes_of = [optimizer._window.operator.rows.nbytes for optimizer in optimizers]
    return {
        "what": "step at 90 % sparsity", "d": weights, "m": m, **in_seconds(times),
        "time_of_dense": times["sparse"] / times["dense"], "window_of_dense": bytes_of[1] / bytes_of[0],
    }  # fmt: skip


def rows():
    for weights, count, m in [(10_000, 10, 64), (270_000, 20, 512), (1_000_000, 20, 256), (5_000_000, 50, 128)]:
        yield bare_step(weights, count, m)
    yield sparse_step()
    yield from overhead(torch.contiguous_format, CONTENDERS)
    # Convolutions are faster with channels last, and the window is not.
    yield from overhead(torch.channels_last, ["SGD, momentum", "AdamW", "FullMatrixAdam, m = 64", "M-FAC, m = 512"])
    yield from fine_tuning()


if __name__ == "__main__":
    save("optimizer", "python benchmarks/bench_optimizer.py", rows())

"""A run that collects gradients to a file, for a process to be killed in: `interrupted_run.py path mode`."""

import sys

from models import CASES, cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from mfac.gradients import collect_gradients

NUM_GRADS = 100


def collect(path: str, mode: str) -> None:
    case = CASES["cnn" if mode == "batch" else "transformer"](72)
    loader = DataLoader(TensorDataset(*case.batch), batch_size=24 if mode == "sample" else 4)
    options = {"per_sample": True, "fisher": "sampled", "output_fn": lambda m, b: m(b[0])}
    options = options if mode == "sample" else {}
    collect_gradients(case.model, cross_entropy, loader, NUM_GRADS, out=path, cycle=True, **options)


if __name__ == "__main__":
    collect(*sys.argv[1:])

"""The random states of Python, numpy and torch: saved, restored and seeded together."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """All random states, as plain values and tensors that `torch.load(weights_only=True)` can read."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy = [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "accelerator": _accelerator()}


def set_random_state(state: RandomState) -> None:
    """Restores what `random_state` returned."""
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["accelerator"]):
        torch.get_device_module().set_rng_state(device_state, index)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers inside are those of the seed; the states outside are restored."""
    before = random_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before)


def _accelerator() -> list[Tensor]:
    if not torch.accelerator.is_available():
        return []
    return [torch.get_device_module().get_rng_state(index) for index in range(torch.accelerator.device_count())]

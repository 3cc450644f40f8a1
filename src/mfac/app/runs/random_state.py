"""The random states of Python, numpy and torch: seeded for a while, saved with a run, put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

RandomState = dict[str, Any]
NUMPY: Any = np.random  # whose annotations lack the functions that exchange a generator


def random_state() -> RandomState:
    """All of it, in plain values and tensors, which `torch.load(weights_only=True)` reads."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy = [kind, np.asarray(keys).tolist(), *rest]
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "accelerator": _accelerator()}


def set_random_state(state: RandomState) -> None:
    """Back to what `random_state` gave; accelerators that it does not have are left alone."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    _set_accelerator(state["accelerator"])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, random numbers are those of the seed; outside they go on as if nothing had been drawn."""
    before = random_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
    finally:
        set_random_state(before)


@contextmanager
def aside() -> Iterator[None]:
    """What is drawn inside does not show outside."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


class PrivateRandomness:
    """Random states of one's own: `with` it, whatever draws goes on where it was at the end of the last `with`.

    It is entered for every batch, so numpy's state, which takes long to copy, is exchanged and not copied.
    """

    def __init__(self, seed: int):
        with seeded(seed):
            self._inside = random.getstate(), torch.get_rng_state(), _accelerator()
        self._numpy = np.random.MT19937(seed % 2**32)

    def __enter__(self) -> None:
        self._outside = random.getstate(), torch.get_rng_state(), _accelerator()
        self._outer_numpy = NUMPY.get_bit_generator()
        NUMPY.set_bit_generator(self._numpy)
        _set(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = random.getstate(), torch.get_rng_state(), _accelerator()
        NUMPY.set_bit_generator(self._outer_numpy)
        _set(self._outside)


def _set(state: tuple[Any, Tensor, list[Tensor]]) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    _set_accelerator(state[2])


def _accelerator() -> list[Tensor]:
    if not torch.accelerator.is_available():
        return []
    return [torch.get_device_module().get_rng_state(index) for index in range(torch.accelerator.device_count())]


def _set_accelerator(states: list[Tensor]) -> None:
    for index, state in enumerate(states):
        torch.get_device_module().set_rng_state(state, index)

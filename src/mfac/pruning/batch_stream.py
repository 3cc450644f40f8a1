"""One walk through the batches for a whole run, so that each recomputation sees other data than the one before."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mfac.gradients.batches import Batch

# Python's, numpy's and torch's random states, as their own functions give them.
RandomState = tuple[Any, Any, torch.Tensor]


class BatchStream:
    """An endless iterator over batches that goes on where it stopped, and starts again at the end.

    What `batches` draws from the global random states (a shuffling loader, an augmentation) it draws from states of the
    stream's own, so that the caller's are left alone and still no two recomputations see the same draws.

    Args:
        batches: any iterable; one that can be run through only once must be long enough.
        seed: where the stream's random states start; None: at the present global ones.

    Raises:
        ValueError: `batches` is a single dict.
    """

    def __init__(self, batches: Iterable[Batch], seed: int | None = None):
        if isinstance(batches, Mapping):
            raise ValueError("batches is one dict, not an iterable of batches; pass [batch], or a DataLoader")
        self.needed = ""  # what the run needs in all, for the message when there is no more
        self._batches = batches
        self._iterator: Iterator[Batch] | None = None
        self._ahead: deque[Batch] = deque()
        self._given = 0
        self._random = _random_state() if seed is None else _seeded_state(seed)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Batch:
        return self._ahead.popleft() if self._ahead else self._read()

    def peek(self, count: int) -> list[Batch]:
        """The next `count` batches, which stay where they are; fewer if there are no more."""
        while len(self._ahead) < count:
            try:
                self._ahead.append(self._read())
            except ValueError:
                if not self._ahead:
                    raise
                break
        return list(self._ahead)[:count]

    def _read(self) -> Batch:
        outside = _random_state()
        _set_random_state(self._random)
        try:
            batch = self._advance()
        finally:
            self._random = _random_state()
            _set_random_state(outside)
        self._given += 1
        return batch

    def _advance(self) -> Batch:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._batches)
            for batch in self._iterator:
                return batch
            self._iterator = None
        if not self._given:
            raise ValueError("batches is empty; at least one batch is needed")
        raise ValueError(
            f"batches gave {self._given} and then nothing more: an iterator runs out for good{self.needed}; "
            "pass a list, a DataLoader or another iterable that can start again"
        )


def _random_state() -> RandomState:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state: RandomState) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _seeded_state(seed: int) -> RandomState:
    return (
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
        torch.Generator().manual_seed(seed).get_state(),
    )

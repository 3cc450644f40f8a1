"""One pass after another through the batches for a whole run, so that each recomputation sees new data."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from mfac.gradients.batches import Batch
from mfac.gradients.model_state import kept_random_state, random_state, seeded, set_random_state


class BatchStream:
    """An endless iterator over batches that continues where it stopped, and starts again at the end.

    What `batches` draws at random (an order, an augmentation) comes from states of the stream, which start at `seed` or
    at the present global ones; the global ones are left alone.
    """

    def __init__(self, batches: Iterable[Batch], seed: int | None = None):
        if isinstance(batches, Mapping):
            raise ValueError("batches is one dict, not an iterable of batches; pass [batch], or a DataLoader")
        self.needed = ""  # how many batches the run needs in all, for the error when there are no more
        self.drawn = 0
        self._batches = batches
        self._iterator: Iterator[Batch] | None = None
        self._ahead: deque[Batch] = deque()
        self._recent: deque[Batch] = deque(maxlen=0)
        with nullcontext() if seed is None else seeded(seed):
            self._random = random_state(())
        self._start = {"random": self._random, "generator": generator_state(batches)}

    def __getstate__(self) -> dict[str, Any]:
        if self._iterator is not None and isinstance(self._batches, DataLoader):
            way = "save its state_dict() and the model's, and load them into one that is built with the same arguments"
            raise TypeError(f"a pruner cannot be pickled or copied while it reads a DataLoader; {way}")
        return vars(self)

    @property
    def pass_length(self) -> int | None:
        """The batches of one pass, if they can be counted."""
        try:
            return len(self._batches) if isinstance(self._batches, Sized) else None
        except TypeError:  # a DataLoader over an iterable has no length
            return None

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Batch:
        batch = self._ahead.popleft() if self._ahead else self._read()
        self.drawn += 1
        self._recent.append(batch)
        return batch

    def remember(self, count: int) -> None:
        """Keeps the last `count` batches of an iterator, for when there are no more."""
        self._recent = deque(maxlen=count if isinstance(self._batches, Iterator) else 0)

    def peek(self, count: int) -> list[Batch]:
        """The next `count` batches, without drawing them; if there are no more, the last ones, or fewer."""
        try:
            while len(self._ahead) < count:
                self._ahead.append(self._read())
        except ValueError:
            if not self._ahead and not self._recent:
                raise
        spare = max(0, len(self._ahead) - count)
        return [*self._recent, *self._ahead][-count - spare :][:count]

    def state_dict(self) -> dict[str, Any]:
        return {**self._start, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any], drawn: int | None = None) -> None:
        """Starts again from the saved random states, and skips as many batches as were drawn (or `drawn` of them)."""
        self._start = {"random": state["random"], "generator": state["generator"]}
        self._random, self._iterator, self.drawn = state["random"], None, 0
        self._ahead.clear()
        set_generator_state(self._batches, state["generator"])
        self.skip_to(state["drawn"] if drawn is None else drawn)

    def skip_to(self, drawn: int) -> None:
        while self.drawn < drawn:
            next(self)

    def _read(self) -> Batch:
        with kept_random_state(()):
            set_random_state(self._random)
            try:
                return self._advance()
            finally:
                self._random = random_state(())

    def _advance(self) -> Batch:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._batches)
            for batch in self._iterator:
                return batch
            self._iterator = None
        given = self.drawn + len(self._ahead)
        if not given:
            raise ValueError("batches is empty; at least one batch is needed")
        raise ValueError(f"batches gave {given} and then ended{self.needed}; pass a list or a DataLoader")


def generator_state(batches: object) -> torch.Tensor | None:
    """The state of a loader's own generator, if it has one."""
    generator = getattr(batches, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def set_generator_state(batches: Any, state: torch.Tensor | None) -> None:
    """Puts back what `generator_state` returned."""
    if state is not None and generator_state(batches) is not None:
        batches.generator.set_state(state)

"""Which rows come from which batches: stretches of whole batches, a row each, or samples of one batch."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from mfac.gradients.batches import Batch, cut, num_samples, placed
from mfac.gradients.fillers import BatchFiller, SampleFiller
from mfac.gradients.row_sinks import RowSink


@dataclass
class Samples:
    """The rows of `count` samples of a batch, from `sample` on; `row` is the first."""

    index: int
    batch: Batch
    sample: int
    row: int
    count: int

    def name(self, position: int) -> str:
        """For messages."""
        return f"sample {self.sample + position} of batch {self.index}"


@dataclass
class Stretch:
    """At most `count` rows from `row` on, one a batch: as many as `batch` gives.

    Each batch is drawn when it is needed and not before: its memory may be used again for the next.
    """

    batch: Iterator[Batch]
    row: int
    count: int

    def name(self, position: int) -> str:
        """For messages."""
        return f"batch {self.row + position}"


def stretches(
    stream: Iterator[Batch], filler: BatchFiller, sink: RowSink, num_grads: int, piece: int
) -> Generator[Stretch, None, str | None]:
    """The rows that the sink does not have, in stretches none of which straddles two pieces of `piece` rows.

    Returns what was found, where that is too little.
    """
    passed = sum(1 for _ in islice(stream, sink.done))
    if passed < sink.done:
        return f"{passed} batches"
    place = partial(placed, device=filler.task.batch_device)
    while (row := sink.done) < num_grads:
        count = min(filler.at_once, num_grads - row, piece - row % piece)
        yield Stretch(map(place, islice(stream, count)), row, count)
        if sink.done == row:
            return f"{row} batches"
    return None


def samples(
    stream: Iterator[Batch], filler: SampleFiller, sink: RowSink, num_grads: int, piece: int
) -> Generator[Samples, None, str | None]:
    """The same for samples. Cuts do not depend on where a run was interrupted: the same cut gives the same bits."""
    row, index, device = 0, -1, filler.task.batch_device
    for index, batch in enumerate(stream):
        count, start = num_samples(batch, index), 0
        while start < count and row < num_grads:
            length = min(filler.chunk_length(row), count - start, num_grads - row, piece - row % piece)
            if row + length > sink.done:
                yield Samples(index, placed(cut(batch, start, start + length), device), start, row, length)
            start, row = start + length, row + length
        if row == num_grads:
            return None
    return f"{row} samples in {index + 1} batches"

"""Rows that all ranks make, each from its own batches, and columns that each keeps: sent over in pieces."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mfac.blocks import FisherBlocks
from mfac.columns import Ranks
from mfac.distributed.shares import ColumnShare
from mfac.gradients.batches import Batch
from mfac.gradients.collection import Collection
from mfac.gradients.fillers import Task
from mfac.gradients.fingerprint import digest
from mfac.gradients.model_state import evaluation
from mfac.gradients.row_sinks import BlocksSink, RowSink, TensorSink

# Rows wait until there are so many bytes of them, and go out in messages of this size: large enough that the time to
# start one does not count, small beside what a rank keeps.
PIECE_BYTES = 32 * 2**20
MESSAGE_BYTES = 8 * 2**20


class ExchangedRows:
    """A sink for the rows that this rank makes; in pieces, all ranks together, they go to those that keep the columns.

    Row i of rank r is row i · size + r of the matrix, so that pieces follow one another in the matrix too. What a rank
    holds is what it keeps, `piece` rows of its own, and a message.

    Args:
        num_grads: m, rows of all ranks.
        shares: of the columns, by rank.
        ranks: that take part.
        made: (dtype, device) of the rows that are made here.
        kept: where this rank's columns of all rows go.
    """

    def __init__(
        self,
        num_grads: int,
        shares: Sequence[ColumnShare],
        ranks: Ranks,
        made: tuple[torch.dtype, torch.device],
        kept: RowSink,
    ):
        self.num_grads, self.shares, self.ranks, self.kept = num_grads, shares, ranks, kept
        self.count = len(range(ranks.rank, num_grads, ranks.size))
        most, dim = -(-num_grads // ranks.size), shares[-1].stop
        self.piece = max(1, min(most, PIECE_BYTES // (dim * made[0].itemsize)))
        self.pieces = -(-most // self.piece)
        self.done = 0
        self._waiting = 0
        with torch.inference_mode(False):
            self._rows = torch.empty(min(self.piece, self.count), dim, dtype=made[0], device=made[1])

    @property
    def full(self) -> bool:
        """Whether this rank has made its rows of the present piece."""
        return self._waiting == self.piece or self.done == self.count

    def room(self, count: int) -> tuple[Float[Tensor, "count d"], bool]:
        """The rows behind those that wait."""
        return self._rows[self._waiting : self._waiting + count], False

    def take(self, count: int) -> None:
        """Lets them wait."""
        self._waiting += count
        self.done += count

    def exchange(self) -> None:
        """Sends this rank's rows of a piece, and takes its columns of all ranks' rows."""
        size, mine = self.ranks.size, self.shares[self.ranks.rank]
        count = min(self.piece * size, self.num_grads - self.kept.done)
        counts = [len(range(rank, count, size)) for rank in range(size)]
        room, _ = self.kept.room(count)
        width = max(1, MESSAGE_BYTES // (self.piece * size * self._rows.dtype.itemsize))
        for first in range(0, max(map(len, self.shares)), width):
            slices = [slice(share.start + first, min(share.start + first + width, share.stop)) for share in self.shares]
            outgoing = [self._rows[: self._waiting, columns].reshape(-1) for columns in slices]
            here = slice(min(first, len(mine)), min(first + width, len(mine)))
            shapes = [(rows, here.stop - here.start) for rows in counts]
            incoming = self.ranks.exchange(outgoing, [rows * columns for rows, columns in shapes])
            for rank, part in enumerate(incoming):
                room[rank::size, here] = part.view(shapes[rank]).to(room.device)
        if self.kept.done == 0:
            _warn_of_repeats(room[:size])
        self.kept.take(count)
        self._waiting = 0


def _warn_of_repeats(first_rows: Float[Tensor, "ranks d"]) -> None:
    """Warns where another rank's first row is that of the first rank: one loader on all ranks, most likely."""
    same = (first_rows[1:] == first_rows[:1]).all(1) & (first_rows[:1] != 0).any()
    if bool(same.any()):
        warnings.warn(
            f"ranks 0 and {int(same.nonzero()[0]) + 1} brought the same gradient; each rank needs batches of its own, "
            "for instance by a DistributedSampler",
            stacklevel=2,
        )


def collect_share(
    collection: Collection,
    task: Task,
    batches: Iterable[Batch],
    shares: Sequence[ColumnShare],
    ranks: Ranks,
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "m share"]:
    """This rank's columns of the rows that all ranks make together."""
    with ranks.together("making room for the gradients"):
        try:
            kept = TensorSink(collection.num_grads, len(shares[ranks.rank]), dtype, device)
        except MemoryError as error:
            raise MemoryError(f"{error}; this is for rank {ranks.rank}: the more ranks, the less for each") from None
        rows = ExchangedRows(collection.num_grads, shares, ranks, (dtype, task.device), kept)
    _run(collection, task, batches, rows)
    return kept.grads


def accumulate_share(
    collection: Collection,
    task: Task,
    batches: Iterable[Batch],
    shares: Sequence[ColumnShare],
    ranks: Ranks,
    block_size: int,
    device: torch.device,
) -> FisherBlocks:
    """This rank's blocks of GᵀG, over the rows that all ranks make together."""
    share, layout = shares[ranks.rank], task.layout
    with ranks.together("making room for the blocks"), torch.inference_mode(False):
        kept = BlocksSink(FisherBlocks(len(share), block_size, share.sizes, device=device), layout.dtype, layout.device)
        rows = ExchangedRows(collection.num_grads, shares, ranks, (layout.dtype, task.device), kept)
    _run(collection, task, batches, rows)
    kept.flush()
    return kept.blocks


def check_ranks(ranks: Ranks, task: Task, collection: Collection, arguments: Mapping[str, object]) -> None:
    """Makes sure that all ranks have the same weights, the same coordinates of them, and the same arguments.

    Raises:
        ValueError: they do not, or the model is wrapped or sharded; on every rank.
    """
    with ranks.together("looking at the model"):
        model, layout = task.model, task.layout
        if isinstance(model, DistributedDataParallel):
            raise ValueError("with a process_group pass the model inside: model.module, not DistributedDataParallel")
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise ValueError(
                "the model has DTensor parameters, of which each rank has a part; gradients are collected over a "
                "process_group where every rank has the whole model"
            )
        coordinates = digest(layout.names, [torch.tensor(layout.sizes), *(k for k in layout.kept if k is not None)])
        weights = digest([], model.parameters())
    found: dict[str, object] = {
        name: getattr(collection, name) for name in ("num_grads", "per_sample", "fisher", "seed")
    }
    found |= arguments
    found |= {"which weights there are (names, sizes and masks)": coordinates, "the model's weights": weights}
    ranks.agree_on(found)


def _run(collection: Collection, task: Task, batches: Iterable[Batch], rows: ExchangedRows) -> None:
    """Makes and exchanges all pieces; what fails on one rank fails on all, and the model is as before."""
    ranks = rows.ranks
    task = replace(task, first=ranks.rank, every=ranks.size)
    progress = collection.progress if ranks.rank == 0 else False  # one bar is enough
    ours = replace(collection, num_grads=max(1, rows.count), total=collection.num_grads, progress=progress)
    chunks = ours.chunks(task, batches, lambda first_batch: (rows, ours.filler(task)), rows.piece)
    with evaluation(task.model), closing(chunks):
        for _ in range(rows.pieces):
            with ranks.together("collecting gradients"):
                while not rows.full:
                    next(chunks)
            rows.exchange()

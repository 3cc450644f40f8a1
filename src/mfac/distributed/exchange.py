"""Rows that all ranks make, each from its own batches, and columns that each rank keeps: exchanged in pieces."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mfac.distributed.shares import ColumnShare, column_shares
from mfac.fisher_blocks import FisherBlocks
from mfac.gradients.accumulate import new_blocks
from mfac.gradients.batches import Batch
from mfac.gradients.collect import Collection, new_rows
from mfac.gradients.model_state import evaluation
from mfac.inverse_fisher import Ranks
from mfac.saved import digest

# A rank makes rows until it has so many bytes of them, and sends them: enough that the time to start a message does not
# count, and little beside what a rank keeps.
PIECE_BYTES = 32 * 2**20


class Exchange(NamedTuple):
    """Rows that all ranks make together from their batches; `shares` are the columns that each of them keeps."""

    collection: Collection
    batches: Iterable[Batch]
    ranks: Ranks
    shares: Sequence[ColumnShare]

    def rows(self, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "m columns"]:
        """This rank's columns of all rows."""
        rank = self.ranks.rank
        with self.ranks.together("making room for the rows"):
            try:
                grads = new_rows(self.collection.num_grads, len(self.shares[rank]), dtype, device)
            except MemoryError as error:
                raise MemoryError(f"{error}; this is for rank {rank}: the more ranks, the less for each") from None
        self._fill(dtype, grads)
        return grads

    def blocks(self, block_size: int, device: torch.device) -> FisherBlocks:
        """This rank's blocks of GᵀG, over all rows."""
        with self.ranks.together("making room for the blocks"):
            blocks = new_blocks(self.shares[self.ranks.rank].sizes, block_size, device)
        self._fill(self.collection.layout.dtype, blocks)
        return blocks

    def _fill(self, dtype: torch.dtype, kept: Tensor | FisherBlocks) -> None:
        """Makes and exchanges all rows, a piece at a time; if one rank fails, all do, and the model is as before.

        Row i of rank r is row i · size + r of the matrix, so that pieces follow one another in the matrix too. A rank
        holds what it keeps, a piece of its own rows, and a message of that size.
        """
        collection, batches, ranks, shares = self
        progress = collection.progress if ranks.rank == 0 else False  # one bar is enough
        ours = replace(collection, first=ranks.rank, every=ranks.size, progress=progress)
        size, dim, most = ranks.size, shares[-1].stop, -(-collection.num_grads // ranks.size)
        piece = max(1, min(most, PIECE_BYTES // (dim * dtype.itemsize)))
        pieces = ours.pieces(ours.stream(batches), piece, dtype, exact=True)
        made = torch.empty(0, dim, dtype=dtype, device=collection.device)
        with evaluation(ours.model, ours.layout.tensors), closing(pieces):
            for start in range(0, most, piece):
                with ranks.together("collecting gradients"):
                    made = next(pieces) if start < ours.count else made[:0]
                first, last = start * size, min((start + piece) * size, collection.num_grads)
                mine = kept[first:last] if isinstance(kept, Tensor) else made.new_empty(last - first, kept.dim)
                self._send(made, mine)
                if start == 0:
                    _warn_of_repeats(mine[:size])
                if not isinstance(kept, Tensor):
                    kept.add(mine)

    def _send(self, made: Float[Tensor, "n d"], into: Float[Tensor, "rows columns"]) -> None:
        """Sends this rank's rows to those that keep the columns, and takes its columns of all ranks' rows."""
        size, columns = self.ranks.size, into.shape[1]
        counts = [len(range(rank, len(into), size)) for rank in range(size)]
        outgoing = [made[:, share.columns].reshape(-1) for share in self.shares]
        parts = self.ranks.exchange(outgoing, [rows * columns for rows in counts])
        for rank, (rows, part) in enumerate(zip(counts, parts, strict=True)):
            into[rank::size] = part.view(rows, columns).to(into.device)


def agreed_exchange(
    collection: Collection, batches: Iterable[Batch], ranks: Ranks, block_size: int | None, **arguments: object
) -> Exchange:
    """Divides the columns among the ranks, once they agree on everything; raises as `check_ranks` does."""
    check_ranks(ranks, collection, {"block_size": block_size, **arguments})
    return Exchange(collection, batches, ranks, column_shares(collection.layout.sizes, ranks.size, block_size))


def check_ranks(ranks: Ranks, collection: Collection, arguments: Mapping[str, object]) -> None:
    """Raises ValueError on every rank unless all have the same weights, coordinates and arguments, of a plain model."""
    with ranks.together("checking the model"):
        model, layout = collection.model, collection.layout
        if isinstance(model, DistributedDataParallel):
            raise ValueError("with a process_group pass the model inside: model.module, not DistributedDataParallel")
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise ValueError(
                "the model has DTensor parameters, of which each rank has a part; gradients are collected over a "
                "process_group where every rank has the whole model"
            )
        coordinates = digest(layout.names, [torch.tensor(layout.sizes), *(k for k in layout.kept if k is not None)])
        weights = digest([], model.parameters())
    found = {name: getattr(collection, name) for name in ("num_grads", "per_sample", "fisher", "seed")}
    own = {"which weights there are (names, sizes and masks)": coordinates, "the model's weights": weights}
    ranks.agree_on({**found, **arguments, **own})


def _warn_of_repeats(first_rows: Float[Tensor, "ranks d"]) -> None:
    """Warns if another rank's first row is that of the first rank: one loader on all ranks, most likely."""
    same = (first_rows[1:] == first_rows[:1]).all(1) & (first_rows[:1] != 0).any()
    if bool(same.any()):
        warnings.warn(
            f"ranks 0 and {int(same.nonzero()[0]) + 1} brought the same gradient; each rank needs batches of its own, "
            "for instance by a DistributedSampler",
            stacklevel=2,
        )

"""The ranks of a process group, which share one matrix by its columns, and what they send one another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from mfac.inverse_fisher import Ranks
from mfac.products import Value
from mfac.saved import digest

# What the other ranks raise when one has raised this; RuntimeError for anything else.
SAME_ERRORS = {"ValueError": ValueError, "MemoryError": MemoryError}
# Newer releases of torch have it under another name, and warn of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupRanks(Ranks):
    """The ranks of a process group. Sums have the same bits on every rank, so what is computed from them has too."""

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group; build it on the ranks of the group alone")

    def sum_(self, values: Tensor) -> Tensor:
        with self._explained("a sum"):
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, piece: Tensor) -> Tensor:
        everything = piece.new_empty(self.size, *piece.shape)
        with self._explained("a gather"):
            _all_gather(everything.flatten(0, 1), piece, group=self.group)
        return everything

    def exchange(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        outgoing, sizes = torch.cat(list(pieces)), [len(piece) for piece in pieces]
        incoming = outgoing.new_empty(sum(lengths), *outgoing.shape[1:])
        with self._explained("an exchange"):
            dist.all_to_all_single(incoming, outgoing, list(lengths), sizes, group=self.group)
        return list(incoming.split(list(lengths)))

    def from_first_(self, values: Tensor) -> Tensor:
        if values.numel():
            raw = values.detach().contiguous().reshape(-1).view(torch.uint8)  # any dtype can be sent as bytes
            with self._explained("a broadcast"):
                dist.broadcast(raw, dist.get_global_rank(self.group, 0), group=self.group)
            values.copy_(raw.view(values.dtype).view(values.shape))
        return values

    def tell(self, value: Value) -> list[Value]:
        told = [value] * self.size
        with self._explained("a comparison"):
            dist.all_gather_object(told, value, group=self.group)
        return told

    def agree_on(self, values: Mapping[str, object]) -> None:
        told = self.tell({what: repr(value) for what, value in values.items()})
        for what, first in told[0].items():
            for rank, theirs in enumerate(told):
                if theirs.get(what) != first:
                    raise ValueError(
                        f"{what} must be the same on every rank: rank {rank} has {theirs.get(what)}, rank 0 {first}; "
                        "pass the same arguments on every rank"
                    )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # our own error is the one to see
                self.tell((type(error).__name__, str(error)))
            raise
        nothing: tuple[str, str] | None = None
        for rank, failure in enumerate(self.tell(nothing)):
            if failure is not None:
                kind, text = failure
                raise SAME_ERRORS.get(kind, RuntimeError)(f"{what} failed on rank {rank}: {kind}: {text}")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} over {self.size} ranks failed on rank {self.rank}: another process has ended, or took longer "
                f"than the timeout of its group; restart from the last checkpoint ({error})"
            ) from error


def describe(named: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, object]:
    """Parameters and masks in a form that ranks can compare by `agree_on`."""
    described: dict[str, object] = {"the number of parameters": len(named)}
    for number, (name, tensor) in enumerate(named.items()):
        text, mask = f"{name}: {list(tensor.shape)} {tensor.dtype}", masks.get(name)
        if mask is not None and not hasattr(mask, "device_mesh"):  # of a DTensor every rank has another piece
            text += f", {int(mask.sum())} weights kept (digest {digest([], [mask])})"
        described[f"parameter {number}"] = text
    return described

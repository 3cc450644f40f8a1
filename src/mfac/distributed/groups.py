"""The processes that share one matrix by its columns, and the little that they tell one another."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Told = TypeVar("Told")
# What a rank raises when another one failed by it; by any other exception, RuntimeError.
ALIKE = {"ValueError": ValueError, "MemoryError": MemoryError}
# Newer releases of torch have it under another name, and warn of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks:
    """A process group of `torch.distributed`; or this process alone, and then nothing is ever sent.

    Sums have the same bits on every rank, so what is computed from them alone has too.

    Args:
        group: whose ranks hold a piece of the columns each; None: this process alone.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group; build it on the ranks of the group alone")

    def sum_(self, values: Tensor) -> Tensor:
        """`values`, which become the sums over the ranks."""
        if self.size > 1:
            with self._explained("a sum"):
                dist.all_reduce(values, group=self.group)
        return values

    def gather(self, piece: Tensor, lengths: Sequence[int]) -> Tensor:
        """The pieces of all ranks, one after the other along the first dimension.

        Args:
            piece: this rank's.
            lengths: of the pieces, by rank.
        """
        if self.size == 1:
            return piece
        longest = max(lengths)
        padded = piece.contiguous()
        if len(piece) < longest:
            padded = piece.new_zeros(longest, *piece.shape[1:])
            padded[: len(piece)] = piece
        everything = piece.new_empty(self.size * longest, *piece.shape[1:])
        with self._explained("a gathering"):
            _all_gather(everything, padded, group=self.group)
        if all(length == longest for length in lengths):
            return everything
        return torch.cat([part[:length] for part, length in zip(everything.split(longest), lengths, strict=True)])

    def exchange(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """What every rank has for this one, by rank.

        Args:
            pieces: what this rank has for each of them, of one dtype, [n, ...] with the same shape behind n.
            lengths: n of what comes, by rank.
        """
        if self.size == 1:
            return list(pieces)
        outgoing = torch.cat(list(pieces))
        incoming = outgoing.new_empty(sum(lengths), *outgoing.shape[1:])
        with self._explained("an exchange"):
            dist.all_to_all_single(
                incoming, outgoing, list(lengths), [len(piece) for piece in pieces], group=self.group
            )
        return list(incoming.split(list(lengths)))

    def from_first_(self, values: Tensor) -> Tensor:
        """`values`, of any dtype, which become those of the first rank."""
        if self.group is not None and self.size > 1 and values.numel():
            raw = values.detach().contiguous().reshape(-1).view(torch.uint8)
            with self._explained("a broadcast"):
                dist.broadcast(raw, dist.get_global_rank(self.group, 0), group=self.group)
            values.copy_(raw.view(values.dtype).view(values.shape))
        return values

    def any(self, flag: bool, device: torch.device | str = "cpu") -> bool:
        """Whether the flag is set on some rank; costs a host sync."""
        return bool(self.sum_(torch.tensor(float(flag), device=device)))

    def total(self, count: int) -> int:
        """The sum of a number that each rank has."""
        return sum(self._tell(count)) if self.size > 1 else count

    def agree(self, what: str, value: object) -> None:
        """Makes sure that all ranks have the same.

        Args:
            what: it is, for the error.
            value: that has a `repr` which tells all of it.

        Raises:
            ValueError: some have another, on every rank alike.
        """
        self.agree_on({what: value})

    def agree_on(self, values: Mapping[str, object]) -> None:
        """Makes sure that all ranks have the same {what it is: value}, all at once.

        Raises:
            ValueError: one of them differs, on every rank alike.
        """
        if self.size == 1:
            return
        told = self._tell({what: repr(value) for what, value in values.items()})
        for what, ours in told[0].items():
            for rank, theirs in enumerate(told):
                if theirs.get(what) != ours:
                    raise ValueError(
                        f"{what} must be the same on every rank: rank {rank} has {theirs.get(what)}, rank 0 {ours}; "
                        "build all of them from the same arguments"
                    )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What fails inside on one rank fails on all of them, so that none waits for it; nothing is sent inside.

        Args:
            what: is done inside, for the error of the others.

        Raises:
            ValueError, MemoryError, RuntimeError: another rank failed; this one's own errors pass as they are.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # our own error is the one to see
                self._tell((type(error).__name__, str(error)))
            raise
        nothing: tuple[str, str] | None = None
        for rank, failure in enumerate(self._tell(nothing)):
            if failure is not None:
                kind, text = failure
                raise ALIKE.get(kind, RuntimeError)(f"{what} failed on rank {rank}: {kind}: {text}")

    def _tell(self, value: Told) -> list[Told]:
        """What every rank has to tell, by rank: anything that can be pickled."""
        told = [value] * self.size
        with self._explained("a comparison"):
            dist.all_gather_object(told, value, group=self.group)
        return told

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} over {self.size} ranks failed on rank {self.rank}: another process has ended, or took longer "
                f"than the timeout of its group; start again from the last checkpoint ({error})"
            ) from error

"""The processes that share one matrix by its columns, and the little that they tell one another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


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
        padded = piece.new_zeros(longest, *piece.shape[1:])
        padded[: len(piece)] = piece
        everything = piece.new_empty(self.size * longest, *piece.shape[1:])
        with self._explained("a gathering"):
            dist.all_gather_into_tensor(everything, padded, group=self.group)
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

    def any(self, flag: bool, device: torch.device | str = "cpu") -> bool:
        """Whether the flag is set on some rank; costs a host sync."""
        return bool(self.sum_(torch.tensor(float(flag), device=device)))

    def agree(self, what: str, value: object) -> None:
        """Makes sure that all ranks have the same.

        Args:
            what: it is, for the error.
            value: that has a `repr` which tells all of it.

        Raises:
            ValueError: some have another, on every rank alike.
        """
        if self.size == 1:
            return
        told: list[str] = [""] * self.size
        with self._explained("a comparison"):
            dist.all_gather_object(told, repr(value), group=self.group)
        others = [rank for rank, theirs in enumerate(told) if theirs != told[0]]
        if others:
            raise ValueError(
                f"{what} must be the same on every rank: rank {others[0]} has {told[others[0]]}, rank 0 {told[0]}; "
                "build all of them from the same arguments"
            )

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{what} over {self.size} ranks failed on rank {self.rank}: another process has ended, or took longer "
                f"than the timeout of its group; start again from the last checkpoint ({error})"
            ) from error

"""Patterns of sparsity that hardware or layers can use: N of every M weights, whole rows, whole channels."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class NOfM:
    """At most `kept` of every `size` consecutive weights along dimension 1 (the inputs) are kept."""

    kept: int
    size: int

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.size

    def check(self, name: str, shape: torch.Size) -> None:
        if len(shape) < 2 or shape[1] % self.size:
            why = f"{name} has shape {tuple(shape)}, and {self.size} must divide its dimension 1"
            raise ValueError(f"pattern {self}: {why}; leave it out with ignore=[{name!r}]")

    def final_keep(self, mask: Tensor) -> int:
        return int(self._grouped(mask).sum(-1).clamp_max(self.kept).sum())

    def offered(self, costs: Tensor, mask: Tensor) -> Tensor:
        """The costs, infinite for removed weights; a group that has lost r weights offers its M − N − r cheapest."""
        grouped = self._grouped(torch.where(mask, costs, torch.inf))
        rank = grouped.argsort(-1).argsort(-1)
        room = self._grouped(mask).sum(-1, keepdim=True) - self.kept
        return self.ungrouped(torch.where(rank < room, grouped, torch.inf), mask.shape)

    def positions(self, mask: Tensor, start: int) -> Int[Tensor, "groups size"]:
        """Each group's positions in a vector of kept weights, this tensor's from `start` on; −1 for removed ones."""
        flat = torch.full((mask.numel(),), -1, device=mask.device)
        flat[mask.flatten()] = torch.arange(start, start + int(mask.sum()), device=mask.device)
        return self._grouped(flat.view(mask.shape)).flatten(0, -2)

    def ungrouped(self, values: Float[Tensor, "*groups size"], shape: torch.Size) -> Tensor:
        return values.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)

    def _grouped(self, values: Tensor) -> Tensor:
        return values.movedim(1, -1).unflatten(-1, (-1, self.size))

    def __str__(self) -> str:
        return f"{self.kept}:{self.size}"


@dataclass(frozen=True)
class Slices:
    """Whole slices along one dimension are removed: 0 is a row (an output), 1 a channel (an input)."""

    kind: str
    dim: int

    def check(self, name: str, shape: torch.Size) -> None:
        if len(shape) <= self.dim:
            way = f"leave it out with ignore=[{name!r}]"
            raise ValueError(f"pattern {self}: {name} has shape {tuple(shape)}, so no {self}s; {way}")

    def groups(self, masks: Mapping[str, Tensor]) -> tuple[dict[str, Int[Tensor, "..."]], dict[str, range]]:
        """The number of every weight's slice, counted over all tensors, and the numbers of each tensor's slices."""
        ids, ranges, first = {}, {}, 0
        for name, mask in masks.items():
            ranges[name] = range(first, first + mask.shape[self.dim])
            numbers = torch.tensor(ranges[name], device=mask.device)
            ids[name] = numbers.expand(mask.movedim(self.dim, -1).shape).movedim(-1, self.dim)
            first = ranges[name].stop
        return ids, ranges

    def __str__(self) -> str:
        return self.kind


Pattern = NOfM | Slices | None


def parse_pattern(pattern: str | None) -> Pattern:
    """Parses "N:M", "row", "channel" or None; raises ValueError for anything else."""
    if pattern is None:
        return None
    if pattern in ("row", "channel"):
        return Slices(pattern, 0 if pattern == "row" else 1)
    match = re.fullmatch(r"(\d+):(\d+)", pattern) if isinstance(pattern, str) else None
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f'pattern must be "N:M" with 0 < N < M, "row", "channel" or None, not {pattern!r}')
    return NOfM(int(match[1]), int(match[2]))

"""Patterns of sparsity that hardware or layers can use: N of every M weights, whole rows, whole channels."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class NOfM:
    """At most `kept` of every `size` consecutive weights along the inputs, a dimension of the weight, are kept."""

    kept: int
    size: int

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.size

    def check(self, name: str, shape: torch.Size, inputs: int) -> None:
        if len(shape) < 2 or shape[inputs] % self.size:
            why = f"{name} has shape {tuple(shape)}, and {self.size} must divide its dimension {inputs}"
            raise ValueError(f"pattern {self}: {why}; leave it out with ignore=[{name!r}]")

    def final_keep(self, mask: Tensor, inputs: int = 1) -> int:
        return int(self._grouped(mask, inputs).sum(-1).clamp_max(self.kept).sum())

    def offered(self, costs: Tensor, mask: Tensor, inputs: int = 1) -> Tensor:
        """The costs, infinite for removed weights; a group that has lost r weights offers its M − N − r cheapest."""
        grouped = self._grouped(torch.where(mask, costs, torch.inf), inputs)
        rank = grouped.argsort(-1).argsort(-1)
        room = self._grouped(mask, inputs).sum(-1, keepdim=True) - self.kept
        return self.ungrouped(torch.where(rank < room, grouped, torch.inf), mask.shape, inputs)

    def positions(self, mask: Tensor, start: int, inputs: int = 1) -> Int[Tensor, "groups size"]:
        """Each group's positions in a vector of kept weights, this tensor's from `start` on; −1 for removed ones."""
        flat = torch.full((mask.numel(),), -1, device=mask.device)
        flat[mask.flatten()] = torch.arange(start, start + int(mask.sum()), device=mask.device)
        return self._grouped(flat.view(mask.shape), inputs).flatten(0, -2)

    def ungrouped(self, values: Float[Tensor, "*groups size"], shape: torch.Size, inputs: int = 1) -> Tensor:
        return values.reshape(*shape[:inputs], *shape[inputs + 1 :], shape[inputs]).movedim(-1, inputs)

    def _grouped(self, values: Tensor, inputs: int) -> Tensor:
        return values.movedim(inputs, -1).unflatten(-1, (-1, self.size))

    def __str__(self) -> str:
        return f"{self.kept}:{self.size}"


@dataclass(frozen=True)
class Slices:
    """Whole slices are removed: a "row" is an output, a "channel" an input."""

    kind: str

    def check(self, name: str, shape: torch.Size, inputs: int) -> None:
        if len(shape) <= self._dim(inputs):
            way = f"leave it out with ignore=[{name!r}]"
            raise ValueError(f"pattern {self}: {name} has shape {tuple(shape)}, so no {self}s; {way}")

    def groups(
        self, masks: Mapping[str, Tensor], inputs: Mapping[str, int]
    ) -> tuple[dict[str, Int[Tensor, "..."]], dict[str, range]]:
        """The number of every weight's slice, counted over all tensors, and the numbers of each tensor's slices."""
        ids, ranges, first = {}, {}, 0
        for name, mask in masks.items():
            dim = self._dim(inputs[name])
            ranges[name] = range(first, first + mask.shape[dim])
            numbers = torch.tensor(ranges[name], device=mask.device)
            ids[name] = numbers.expand(mask.movedim(dim, -1).shape).movedim(-1, dim)
            first = ranges[name].stop
        return ids, ranges

    def _dim(self, inputs: int) -> int:
        return inputs if self.kind == "channel" else 1 - inputs

    def __str__(self) -> str:
        return self.kind


Pattern = NOfM | Slices | None


def parse_pattern(pattern: str | None) -> Pattern:
    """Parses "N:M", "row", "channel" or None; raises ValueError for anything else."""
    if pattern is None:
        return None
    if pattern in ("row", "channel"):
        return Slices(pattern)
    match = re.fullmatch(r"(\d+):(\d+)", pattern) if isinstance(pattern, str) else None
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f'pattern must be "N:M" with 0 < N < M, "row", "channel" or None, not {pattern!r}')
    return NOfM(int(match[1]), int(match[2]))

"""The options of pruning: names, defaults and checks, for `prune`, `GradualPruner`, `Pruner` and the command line."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch.distributed as dist

from mfac.gradients.batches import Batch
from mfac.gradients.collect import Fisher
from mfac.inverse_fisher import ranks_of
from mfac.pruning.patterns import Slices, parse_pattern
from mfac.pruning.weights import Names

Scope = Literal["global", "layer"]

METHODS = ("mfac", "magnitude", "diagonal")
UPDATES = ("joint", "obs", "none")
SCOPES = ("global", "layer")
ORDERS = ("scores", "greedy")


@dataclass(frozen=True)
class PruningOptions:
    """How to prune; `mfac.prune` documents each option."""

    num_grads: int = 64
    block_size: int | None = 128
    damping: float | str = 1e-5
    recomputations: int = 16
    update: str = "joint"
    scope: Scope = "global"
    pattern: str | None = None
    targets: Names = None
    ignore: Names = None
    method: str = "mfac"
    order: str = "scores"
    floor: float = 1
    per_sample: bool = False
    fisher: Fisher = "empirical"
    bn_batches: Iterable[Batch] | None = None
    loss_batches: int = 4
    rows_dir: str | os.PathLike[str] | None = None
    seed: int | None = None
    progress: bool | None = None
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> "PruningOptions":
        return cls(**{option.name: arguments[option.name] for option in fields(cls)})

    def __post_init__(self) -> None:
        ranks = ranks_of(self.process_group)
        with ranks.together("checking the options"):
            self._check_values()
            self._check_combinations(ranks.size)

    def _check_values(self) -> None:
        for name in ("num_grads", "recomputations", "loss_batches"):
            if not _is_positive_int(getattr(self, name)):
                raise ValueError(f"{name} must be a positive int, not {getattr(self, name)!r}")
        if self.block_size is not None and not _is_positive_int(self.block_size):
            raise ValueError(f"block_size must be a positive int or None (the full matrix), not {self.block_size!r}")
        for name, choices in (("method", METHODS), ("update", UPDATES), ("scope", SCOPES), ("order", ORDERS)):
            if getattr(self, name) not in choices:
                hint = "; other methods are baselines under experiments/" if name == "method" else ""
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {expected}, not {getattr(self, name)!r}{hint}")
        floor = self.floor
        if not is_number(floor) or floor < 0 or (floor > 1 and floor % 1):
            raise ValueError(f"floor must be a number of weights or, below 1, a fraction of a tensor, not {floor!r}")
        if self.damping != "auto" and (isinstance(self.damping, str) or not self.damping > 0):
            raise ValueError(f'damping must be a positive number or "auto", not {self.damping!r}')

    def _check_combinations(self, ranks: int) -> None:
        pattern = parse_pattern(self.pattern)
        if self.order == "greedy" and (self.method != "mfac" or pattern is not None):
            raise ValueError('order="greedy" requires method="mfac" without a pattern; use order="scores"')
        if self.damping == "auto" and self.method == "diagonal":
            raise ValueError("damping=\"auto\" requires method 'mfac'; give method 'diagonal' a number")
        if self.damping == "auto" and self.method == "mfac" and self.rows_dir is not None:
            raise ValueError('damping="auto" needs the rows in memory, and rows_dir puts them on disk; drop one')
        if ranks > 1 and self.rows_dir is not None:
            raise ValueError("rows_dir is for one process; with a process_group every rank keeps its columns in memory")
        full = ranks > 1 and self.method == "mfac" and self.block_size is None
        if full and isinstance(pattern, Slices) and pattern.dim != 0:
            raise ValueError(f"pattern {pattern} with the full matrix works on one process only; give a block_size")


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The options of pruning: names, defaults and checks, for `prune`, `GradualPruner`, `Pruner` and the command line."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, get_args

import torch.distributed as dist

from mfac.gradients.batches import Batch
from mfac.gradients.collect import Fisher
from mfac.gradients.losses import OutputFn
from mfac.inverse_fisher import check_damping, ranks_of
from mfac.memory import check_count, is_count, parse_bytes
from mfac.pruning.patterns import Slices, parse_pattern
from mfac.pruning.weights import Names

Scope = Literal["global", "layer"]

METHODS = ("mfac", "magnitude", "diagonal")
UPDATES = ("auto", "joint", "obs", "none")
SCOPES = ("global", "layer")
ORDERS = ("scores", "greedy")
PRIORS = (None, "kron")
FISHERS = ("auto", *get_args(Fisher))


@dataclass(frozen=True)
class PruningOptions:
    """How to prune; `mfac.prune` documents each option."""

    num_grads: int | None = None
    block_size: int | str | None = "row"
    damping: float | str = "auto"
    recomputations: int = 16
    update: str = "auto"
    prior: str | None = None
    scope: Scope = "global"
    pattern: str | None = None
    targets: Names = None
    ignore: Names = None
    method: str = "mfac"
    order: str = "scores"
    floor: float = 1
    per_sample: bool = False
    fisher: str = "auto"
    output_fn: OutputFn | None = None
    recalibrate: bool | str | Iterable[Batch] = "auto"
    refit: bool | str = "auto"
    bn_batches: Iterable[Batch] | None = None
    loss_batches: int = 4
    rows_dir: str | os.PathLike[str] | None = None
    memory: int | str | None = None
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
        check_count("num_grads", 1 if self.num_grads is None else self.num_grads)
        check_count("recomputations", self.recomputations)
        check_count("loss_batches", self.loss_batches)
        if self.block_size not in ("row", None) and not is_count(self.block_size):
            expected = 'a positive int, "row" (the inputs of an output) or None (the full matrix)'
            raise ValueError(f"block_size must be {expected}, not {self.block_size!r}")
        parse_bytes(self.memory)
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed must be an int or None, not {self.seed!r}")
        asked = self.recalibrate
        if not isinstance(asked, bool | Iterable) or (isinstance(asked, str) and asked != "auto"):
            raise ValueError(f'recalibrate must be "auto", True, False or batches, not {self.recalibrate!r}')
        if self.refit not in (True, False, "auto"):
            raise ValueError(f'refit must be "auto", True or False, not {self.refit!r}')
        chosen = {"method": METHODS, "update": UPDATES, "scope": SCOPES, "order": ORDERS, "fisher": FISHERS,
                  "prior": PRIORS}  # fmt: skip
        for name, choices in chosen.items():
            if getattr(self, name) not in choices:
                hint = "; other methods are baselines under experiments/" if name == "method" else ""
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {expected}, not {getattr(self, name)!r}{hint}")
        floor = self.floor
        if not is_number(floor) or floor < 0 or (floor > 1 and floor % 1):
            raise ValueError(f"floor must be a number of weights or, below 1, a fraction of a tensor, not {floor!r}")
        if isinstance(self.damping, str) and self.damping != "auto":
            raise ValueError(f'damping must be a positive number or "auto", not {self.damping!r}')
        if not isinstance(self.damping, str):
            check_damping(self.damping)

    def _check_combinations(self, ranks: int) -> None:
        pattern = parse_pattern(self.pattern)
        if ranks > 1 and self.refit is True:
            raise ValueError("refit=True is for one process; with a process_group leave it out")
        if self.order == "greedy" and (self.method != "mfac" or pattern is not None):
            raise ValueError('order="greedy" requires method="mfac" without a pattern; use order="scores"')
        if self.prior == "kron" and self.block_size != "row":
            raise ValueError(f'prior="kron" needs block_size="row", not {self.block_size!r}; drop one of them')
        if self.rows_dir is not None and (self.block_size == "row" or self.damping == "auto"):
            needs = "rows_dir keeps the gradients on disk, which needs a block_size (or None) and a number as damping"
            raise ValueError(f'{needs}; blocks of outputs need no rows: memory="4GB" limits what they take')
        if ranks > 1 and self.rows_dir is not None:
            raise ValueError("rows_dir is for one process; with a process_group every rank keeps its columns in memory")
        full = ranks > 1 and self.method == "mfac" and self.block_size is None
        if full and isinstance(pattern, Slices) and pattern.kind != "row":
            raise ValueError(f"pattern {pattern} with the full matrix works on one process only; give a block_size")

    @property
    def refits(self) -> bool:
        """Whether the model is fitted to the outputs that it had; "auto": with all other defaults that matter to it."""
        usual = self.by_output and self.update == "auto" and self.fisher == "gauss-newton"
        usual = usual and self.recalibrate is not False and self.process_group is None
        return usual if self.refit == "auto" else bool(self.refit)

    @property
    def by_output(self) -> bool:
        """Whether blocks are the inputs of one output."""
        return self.method == "mfac" and self.block_size == "row"


def is_number(value: object) -> bool:
    """Whether it is a real number of Python or numpy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)

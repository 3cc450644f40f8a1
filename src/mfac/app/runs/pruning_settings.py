"""What `mfac prune` is told, and what of it is wrong before anything is done."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from mfac.pruning.budget import check_sparsity
from mfac.pruning.options import METHODS
from mfac.pruning.patterns import NOfM, parse_pattern
from mfac.pruning.schedules import geometric_schedule, polynomial_schedule
from mfac.pruning.targets import choose_targets

SCHEDULES = ("geometric", "polynomial")


@dataclass(frozen=True)
class PruningSettings:
    """The arguments of `mfac.prune` under the same names, and those of a run.

    Args:
        methods: one cell for each of them and each sparsity.
        sparsities: each from the same dense weights; none with an "N:M" pattern, which has its own.
        gradual: go there in `steps` of `schedule`, with `epochs` of training after each.
        lr: of SGD with momentum in that training; None: the task's own optimizer, or SGD at 0.01.
        seed: of everything that is drawn.
        checkpoint: a file to start from; None: the task's model, trained first where the task can.
        save_every: seconds between saves in training; no part of what the run is.
    """

    methods: tuple[str, ...] = ("mfac",)
    sparsities: tuple[float, ...] = (0.9,)
    recomputations: int = 16
    num_grads: int = 64
    block_size: int | None = 128
    damping: float | str = 1e-5
    update: str = "joint"
    scope: str = "global"
    pattern: str | None = None
    order: str = "scores"
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_sample: bool = False
    fisher: str = "empirical"
    loss_batches: int = 4
    gradual: bool = False
    schedule: str = "geometric"
    steps: int = 5
    epochs: int = 1
    lr: float | None = None
    momentum: float = 0.9
    seed: int = 0
    device: str = "cpu"
    checkpoint: str | None = None
    rows_dir: str | None = None
    save_every: float = 30.0

    def flat(self) -> dict[str, Any]:
        """All settings that decide the result, as run.json has them."""
        left_out = {"rows_dir", "save_every"}
        if not self.gradual:
            left_out |= {"schedule", "steps", "epochs", "lr", "momentum"}
        return {key: value for key, value in asdict(self).items() if key not in left_out}

    def cells(self) -> list[tuple[str, float]]:
        """(method, sparsity) of every cell, in the order asked for."""
        return [(method, sparsity) for method in self.methods for sparsity in self._asked()]

    def prune_options(self, method: str) -> dict[str, Any]:
        """The arguments of `mfac.prune` that are the same at every step."""
        names = ("num_grads", "block_size", "damping", "update", "scope", "pattern", "order", "per_sample", "fisher")
        options = {name: getattr(self, name) for name in (*names, "loss_batches", "rows_dir")}
        lists = {"targets": list(self.targets) or None, "ignore": list(self.ignore) or None}
        return {**options, **lists, "method": method, "progress": False}

    def sparsities_to(self, sparsity: float) -> list[float]:
        """The schedule of gradual pruning; a pattern N:M is one step, since it has one sparsity."""
        if isinstance(parse_pattern(self.pattern), NOfM):
            return [sparsity]
        schedule = geometric_schedule if self.schedule == "geometric" else polynomial_schedule
        return schedule(0.0, sparsity, self.steps)

    def check(self, model: nn.Module) -> None:
        """Raises ValueError for what can be known to be wrong before anything is done."""
        for what, values, choices in (("method", self.methods, METHODS), ("schedule", (self.schedule,), SCHEDULES)):
            for value in values:
                if value not in choices:
                    raise ValueError(f"{what} must be one of {', '.join(choices)}, not {value!r}")
        pattern = parse_pattern(self.pattern)
        if isinstance(pattern, NOfM) and self.sparsities and self.sparsities != (pattern.sparsity,):
            raise ValueError(f"pattern {pattern} has a sparsity of its own, {pattern.sparsity:g}; leave sparsity out")
        for what, given in (("method", self.methods), ("sparsity", tuple(self._asked()))):
            if not given or len(set(given)) != len(given):
                raise ValueError(f"give one {what} or several, each once, not {', '.join(map(str, given)) or 'none'}")
        for sparsity in self._asked():
            check_sparsity(sparsity)
        for key in ("recomputations", "num_grads", "steps", "epochs", "loss_batches"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be 1 or more, not {getattr(self, key)}")
        choose_targets(model, list(self.targets) or None, list(self.ignore) or None)

    def _asked(self) -> list[float]:
        pattern = parse_pattern(self.pattern)
        return [pattern.sparsity] if isinstance(pattern, NOfM) else list(self.sparsities)

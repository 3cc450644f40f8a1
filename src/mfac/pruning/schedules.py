"""Schedules of gradual pruning: lists of rising sparsities, and the learning rate between pruning steps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mfac.memory import check_count
from mfac.pruning.options import is_number

PAPER_FIRST = 0.5  # the paper prunes half of the weights at once, which is easily recovered from


def polynomial_schedule(initial: float, final: float, steps: int, power: float = 3) -> list[float]:
    """The sparsities s_t = final + (initial − final)(1 − t/steps)^power, t = 1 … steps (Zhu and Gupta, 2017).

    The list ends with `final` and leaves out the present sparsity, `initial`. A power of 1 is linear.
    """
    _check_ends(initial, final, steps)
    if not (is_number(power) and power > 0 and math.isfinite(power)):
        raise ValueError(f"power must be a positive number (3 is usual), not {power!r}")
    return [*(final + (initial - final) * (1 - t / steps) ** power for t in range(1, steps)), float(final)]


def geometric_schedule(initial: float, final: float, steps: int) -> list[float]:
    """Every step keeps the same fraction ((1 − final)/(1 − initial))^(1/steps) of the remaining weights.

    The list ends with `final`, which is below 1, and leaves out the present sparsity, `initial`.
    """
    _check_ends(initial, final, steps)
    if final == 1:
        raise ValueError("steps of equal fractions never reach a sparsity of 1; choose a final sparsity below it")
    kept = (1 - final) / (1 - initial)
    return [*(1 - (1 - initial) * kept ** (t / steps) for t in range(1, steps)), float(final)]


def mobilenet_schedule(final: float) -> list[float]:
    """The paper's schedule for MobileNetV1: half of the weights at once, then 15 steps of equal fractions."""
    return [PAPER_FIRST, *geometric_schedule(PAPER_FIRST, final, 15)]


def resnet50_schedule(final: float) -> list[float]:
    """The paper's schedule for ResNet50: as for MobileNetV1, with the last 5 steps replaced by 10 smaller ones."""
    first = geometric_schedule(PAPER_FIRST, final, 15)[:10]
    return [PAPER_FIRST, *first, *geometric_schedule(first[-1], final, 10)]


@dataclass
class CycleFactor:
    """The factor of the learning rate at an epoch; a class, since `LambdaLR.state_dict` saves an object's fields."""

    period: int
    cycles: int
    low: int
    factor: float
    drops: tuple[int, ...]

    def __call__(self, epoch: int) -> float:
        if epoch < self.period * self.cycles:
            return self.factor if epoch % self.period >= self.period - self.low else 1.0
        return float(self.factor ** sum(epoch >= drop for drop in self.drops))


def learning_rate_cycle(
    optimizer: Optimizer, period: int, cycles: int, *, low: int = 1, factor: float = 0.1, drops: Sequence[int] = (),
    last_epoch: int = -1,
) -> LambdaLR:  # fmt: skip
    """A scheduler for fine-tuning between pruning steps, as in the paper's practical runs.

    Each period starts with the optimizer's own learning rate and ends with `low` epochs at `factor` times it: a model
    that has settled is a better start for pruning. After the last cycle the rate falls at `drops`.
    MobileNetV1 is `period=3, cycles=15, drops=(75, 90)`, ResNet50 `period=4, cycles=20, drops=(90, 95)`, both at 0.005.

    Args:
        optimizer: whose learning rates are scaled, group by group.
        period: epochs (or whatever `scheduler.step()` counts) from one pruning step to the next.
        cycles: how many periods there are before the last pruning step.
        low: epochs at the end of each period with the small rate.
        factor: of the small rate, and of each drop.
        drops: epochs, counted from the start, at which the rate drops by the factor for good.
        last_epoch: as in any torch scheduler.

    Raises:
        ValueError: an empty period, a `low` longer than it, or drops that do not rise after the cycles.
    """
    if period < 1 or cycles < 0:
        raise ValueError(f"period must be at least 1 and cycles at least 0, not {period} and {cycles}")
    if not 0 <= low <= period:
        raise ValueError(f"low must be between 0 and the period of {period}, not {low}")
    if not factor > 0:
        raise ValueError(f"factor must be above 0, not {factor}")
    if list(drops) != sorted(set(drops)) or any(drop < period * cycles for drop in drops):
        raise ValueError(f"drops must be rising epochs after the cycles, which end at epoch {period * cycles}")
    return LambdaLR(optimizer, CycleFactor(period, cycles, low, factor, tuple(drops)), last_epoch)


def checked_schedule(schedule: Iterable[float]) -> tuple[float, ...]:
    """The schedule as a tuple of floats; raises ValueError if it is empty, does not rise, or leaves (0, 1]."""
    if isinstance(schedule, int | float | str):
        raise ValueError(f"schedule must be a list of sparsities, not {schedule!r}; [{schedule}] is one step")
    values = tuple(schedule)
    if not values:
        raise ValueError("schedule is empty; it needs one sparsity for each pruning step, such as [0.5, 0.8, 0.9]")
    for index, (before, value) in enumerate(zip((0.0, *values), values, strict=False)):
        if not is_number(value) or not 0 < value <= 1:
            raise ValueError(f"schedule[{index}] is {value!r}; each entry is a sparsity above 0 and at most 1")
        if value <= before:
            raise ValueError(f"schedule[{index}] is {value}, not above the {before} before it; sparsities must rise")
    return tuple(float(value) for value in values)


def _check_ends(initial: float, final: float, steps: int) -> None:
    if not (is_number(initial) and is_number(final) and 0 <= initial < final <= 1):
        raise ValueError(f"a schedule needs 0 <= initial < final <= 1; these are {initial!r} and {final!r}")
    check_count("steps", steps)

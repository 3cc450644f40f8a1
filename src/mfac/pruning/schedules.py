"""Schedules of gradual pruning: lists of rising sparsities."""

import math
from collections.abc import Iterable

PAPER_FIRST = 0.5  # the paper prunes half of the weights at once, which is easily recovered from


def polynomial_schedule(initial: float, final: float, steps: int, power: float = 3) -> list[float]:
    """The sparsities s_t = final + (initial − final)(1 − t/steps)^power, t = 1 … steps (Zhu and Gupta, 2017).

    Args:
        initial: the present sparsity, not part of the list.
        final: the last sparsity of the list.
        steps: the length of the list.
        power: 3 takes large steps first and small ones last; 1 is linear.

    Raises:
        ValueError: the sparsities do not rise within [0, 1], or steps or power is not positive.
    """
    _check_ends(initial, final, steps)
    if not (_is_number(power) and power > 0 and math.isfinite(power)):
        raise ValueError(f"power must be a positive number (3 is usual), not {power!r}")
    inner = [final + (initial - final) * (1 - t / steps) ** power for t in range(1, steps)]
    return [*inner, float(final)]


def geometric_schedule(initial: float, final: float, steps: int) -> list[float]:
    """Every step keeps the same fraction ((1 − final)/(1 − initial))^(1/steps) of the remaining weights.

    Args:
        initial: the present sparsity, not part of the list.
        final: the last sparsity of the list, below 1.
        steps: the length of the list.

    Raises:
        ValueError: the sparsities do not rise within [0, 1), or steps is not positive.
    """
    _check_ends(initial, final, steps)
    if final == 1:
        raise ValueError("steps of equal fractions never reach a sparsity of 1; choose a final sparsity below it")
    kept = (1 - final) / (1 - initial)
    inner = [1 - (1 - initial) * kept ** (t / steps) for t in range(1, steps)]
    return [*inner, float(final)]


def mobilenet_schedule(final: float) -> list[float]:
    """The paper's schedule for MobileNetV1: half of the weights at once, then 15 steps of equal fractions."""
    return [PAPER_FIRST, *geometric_schedule(PAPER_FIRST, final, 15)]


def resnet50_schedule(final: float) -> list[float]:
    """The paper's schedule for ResNet50: as for MobileNetV1, with the last 5 steps replaced by 10 smaller ones."""
    first = geometric_schedule(PAPER_FIRST, final, 15)[:10]
    return [PAPER_FIRST, *first, *geometric_schedule(first[-1], final, 10)]


def checked_schedule(schedule: Iterable[float]) -> tuple[float, ...]:
    """The schedule as a tuple of floats; raises ValueError if it is empty, does not rise, or leaves (0, 1]."""
    if isinstance(schedule, int | float | str):
        raise ValueError(f"schedule must be a list of sparsities, not {schedule!r}; [{schedule}] is one step")
    values = tuple(schedule)
    if not values:
        raise ValueError("schedule is empty; it needs one sparsity for each pruning step, such as [0.5, 0.8, 0.9]")
    before = 0.0
    for index, value in enumerate(values):
        if not _is_number(value) or not 0 < value <= 1:
            raise ValueError(
                f"schedule[{index}] is {value!r}; each entry is a sparsity, "
                "a number above 0 and at most 1 (0.9 removes 90 %)"
            )
        if value <= before:
            raise ValueError(
                f"schedule[{index}] is {value}, not above the {before} before it; "
                "sparsities must rise, since removed weights do not come back"
            )
        before = value
    return tuple(float(value) for value in values)


def _check_ends(initial: float, final: float, steps: int) -> None:
    if not (_is_number(initial) and _is_number(final) and 0 <= initial < final <= 1):
        raise ValueError(
            f"a schedule rises from an initial to a final sparsity, both fractions: 0 <= initial < final <= 1; "
            f"these are {initial!r} and {final!r}"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be a positive int, not {steps!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

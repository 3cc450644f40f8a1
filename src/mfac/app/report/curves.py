"""Long curves made fit for a page: means and ranges over seeds, light smoothing, and thinning that keeps the peaks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
POINTS_OF_A_PLOT = 5000


@dataclass(frozen=True)
class Spread:
    """Mean, lowest and highest value at each place; NaN where no curve has one."""

    mean: Array
    low: Array
    high: Array


def as_array(values: Sequence[float | None]) -> Array:
    """Numbers with NaN where there is none."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def over_seeds(curves: Sequence[Array]) -> Spread:
    """Mean and range of curves, at each place over those that reach it."""
    longest = max((len(curve) for curve in curves), default=0)
    stack = np.full((len(curves), longest), np.nan)
    for row, curve in zip(stack, curves, strict=True):
        row[: len(curve)] = curve
    there = np.isfinite(stack)
    counts = there.sum(axis=0)
    mean = np.where(there, stack, 0.0).sum(axis=0) / np.where(counts, counts, 1)
    low = np.where(there, stack, np.inf).min(axis=0, initial=np.inf)
    high = np.where(there, stack, -np.inf).max(axis=0, initial=-np.inf)
    empty = counts == 0
    return Spread(*(np.where(empty, np.nan, values) for values in (mean, low, high)))


def smoothed(values: Array, window: int) -> Array:
    """The mean of the `window` values around each place, of fewer at both ends; NaN values are left out of it."""
    if window <= 1 or len(values) == 0:
        return values
    there = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    place = np.arange(len(values))
    # At the start as far to the right as to the left, so that a curve that falls at once is not bent there.
    back = np.minimum(place, window // 2)
    first, last = place - back, np.minimum(place + back + 1, len(values))
    number = counts[last] - counts[first]
    means = (sums[last] - sums[first]) / np.where(number, number, 1)
    return np.where(number == 0, np.nan, means)


def window_of(count: int) -> int:
    """How many values a light smoothing takes: a fortieth of the curve, always an odd number."""
    return 2 * (min(count // 40, 500) // 2) + 1


def points_each(curves: int) -> int:
    """How many points each of so many curves may have."""
    return max(40, min(400, POINTS_OF_A_PLOT // max(curves, 1)))


def peaks(values: Array, most: int) -> list[int]:
    """Places that draw the same picture as all of them: the lowest and the highest of each stretch."""
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        there = stretch[np.isfinite(values[stretch])]
        if len(there) < len(stretch):
            kept.add(int(stretch[~np.isfinite(values[stretch])][0]))
        if len(there):
            kept.update((int(there[values[there].argmin()]), int(there[values[there].argmax()])))
    return sorted(kept)


def pairs(x: Array, y: Array, places: Sequence[int]) -> list[tuple[float, float | None]]:
    """Points of a plot; None where y is not finite."""
    return [(float(x[i]), float(y[i]) if np.isfinite(y[i]) else None) for i in places if np.isfinite(x[i])]

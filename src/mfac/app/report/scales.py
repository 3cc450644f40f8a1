"""Scales: where a value stands on an axis, and which values get a tick."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST_OWN_TICKS, APART = 8, 0.115
SPARSITY_TICKS = (0, 20, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`; `warp` is the identity, a logarithm or the like; `log` says that it is one."""

    low: float
    high: float
    ticks: tuple[float, ...]
    warp: Callable[[float], float] = float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.warp(self.low), self.warp(self.high)
        inside = min(max(value, self.low), self.high)
        return (self.warp(inside) - low) / (high - low)

    def titled(self, name: str) -> str:
        """The name of the axis."""
        return f"{name}, log scale" if self.log else name

    def label(self, tick: float) -> str:
        """A tick, written with as many decimals as the ticks need to differ; powers of ten where they are extreme."""
        if tick and self.log and not 1e-3 <= abs(tick) < 1e5:
            mantissa, exponent = f"{tick:.1e}".split("e")
            power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
            return power if mantissa == "1.0" else f"{mantissa.removesuffix('.0')}·{power}"
        if self.log or len(self.ticks) < 2:
            return f"{tick:,.10g}"
        step = min(b - a for a, b in pairwise(self.ticks))
        largest = max(abs(tick) for tick in self.ticks)
        if step < 1e-6 or largest >= 1e9:
            return f"{tick:.3g}"
        return f"{tick / 1000:,.10g}k" if tick and largest >= 1e5 else f"{tick:,.10g}"


def linear_scale(values: Sequence[float], zero: bool = False, count: int = 5) -> Scale:
    """Round numbers around the values; from 0 where `zero` is asked for."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(low, 0.0) if zero else low
    if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
        room = abs(high) * 0.1 or 1.0
        low, high = (low if zero else low - room), high + room
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(float(f"{place * step:.12g}") for place in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def tight_scale(values: Sequence[float], count: int = 5) -> Scale:
    """From zero to the largest value, as for steps and seconds, with ticks at the round numbers on the way."""
    rounded, high = linear_scale(values, zero=True, count=count), max(values, default=0.0)
    if high <= 0:
        return rounded
    return Scale(0.0, high, tuple(tick for tick in rounded.ticks if 0 <= tick <= high))


def log_scale(values: Sequence[float], most: int = 7) -> Scale:
    """Powers of ten, with 2 and 5 between them where the range is short; the values are positive."""
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 0.2:
        low, high = low - 0.1, high + 0.1
    room = 0.03 * (high - low)
    low, high = low - room, high + room
    candidates = [(1,), (1, 3), (1, 2, 5)] if high - low >= 1 else [(1, 2, 5), (1, 1.5, 2, 3, 5, 7)]
    ticks: tuple[float, ...] = ()
    for digits in candidates:
        denser = _log_ticks(low, high, digits)
        if len(denser) <= most or not ticks:
            ticks = denser
    # Between two neighbours of the densest there may be none: then the middle, to two digits, which is surely inside.
    ticks = ticks or (float(f"{10 ** ((low + high) / 2):.2g}"),)
    stride = -(-len(ticks) // most)
    return Scale(10**low, 10**high, ticks[::stride], math.log10, log=True)


def sparsity_scale(percents: Sequence[float]) -> Scale:
    """Per cent of weights removed, spaced by the weights that are left where sparsities are high, so that 95 and 98
    stand apart; a model without any weights left has no place on such an axis, and gets a linear one. Ticks are at the
    sparsities themselves where these are few and round.
    """
    low, high = min(percents), max(percents)
    if high < 90 or high >= 100 or low < 0:
        return linear_scale(percents)
    low, high = min(low, 99.0) - 0.06 * (100 - min(low, 99.0)), 100 - 0.92 * (100 - high)
    scale = Scale(max(low, 0.0), high, (), _removed_log)
    own = {round(percent, 1) for percent in percents}
    few_and_round = len(own) <= MOST_OWN_TICKS and all(2 * tick % 1 == 0 for tick in own)
    ticks = _apart(scale, own) if few_and_round else ()
    return Scale(scale.low, scale.high, ticks or _apart(scale, SPARSITY_TICKS), _removed_log)


def value_scale(values: Sequence[float], log_from: float = 30.0) -> Scale:
    """A logarithmic scale where the values are positive and `log_from` times apart, a linear one otherwise."""
    if values and min(values) > 0 and max(values) / min(values) >= log_from:
        return log_scale(values)
    return linear_scale(values)


def _apart(scale: Scale, candidates: Iterable[float]) -> tuple[float, ...]:
    """Ticks out of the candidates, from the highest on, with room for their labels between them."""
    ticks: list[float] = []
    for tick in sorted(candidates, reverse=True):
        if scale.low <= tick <= scale.high and (not ticks or scale.place(ticks[-1]) - scale.place(tick) > APART):
            ticks.append(tick)
    return tuple(reversed(ticks))


def _removed_log(percent: float) -> float:
    return -math.log10(100 - percent)


def _log_ticks(low: float, high: float, digits: Sequence[float]) -> tuple[float, ...]:
    exponents = range(math.floor(low), math.ceil(high) + 1)
    ticks = (float(f"{digit}e{exponent}") for exponent in exponents for digit in digits)
    return tuple(tick for tick in ticks if 10**low <= tick <= 10**high)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * 0.999)

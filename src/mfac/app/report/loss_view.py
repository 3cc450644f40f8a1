"""Training losses by step and by second: smoothed, with the raw curve thin behind, mean and range over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mfac.app.report.curves import Array, as_array, over_seeds, pairs, peaks, points_each, smoothed, window_of
from mfac.app.report.figures import Figure
from mfac.app.report.lines import Curve, Plot, line_legend, line_plot
from mfac.app.report.quantities import LOSS, STEP, Quantity, time_quantity
from mfac.app.report.scales import tight_scale, value_scale
from mfac.app.report.tables import Table, evenly

Values = Sequence[float | None]
ROWS, MARKS = 60, 7


@dataclass(frozen=True)
class Trace:
    """The losses of one label: for each seed its steps, its seconds so far and its losses."""

    label: str
    style: int
    seeds: Sequence[tuple[Values, Values, Values]]


@dataclass(frozen=True)
class Smooth:
    """A trace over its seeds: steps, seconds, the mean raw loss, and the smoothed one with its range."""

    steps: Array
    seconds: Array
    raw: Array
    mean: Array
    low: Array
    high: Array


def loss_figures(ident: str, traces: Sequence[Trace]) -> list[Figure]:
    """The loss by step and the loss by second; none where no loss is finite."""
    smooth = [_smooth(trace) for trace in traces]
    if not any(np.isfinite(one.mean).any() for one in smooth):
        return []
    time = time_quantity(
        [float(one.seconds[-1]) for one in smooth if len(one.seconds) and np.isfinite(one.seconds[-1])]
    )
    by_step = _figure(f"{ident}-loss-step", "Training loss by step", STEP, traces, smooth, "steps")
    by_second = _figure(f"{ident}-loss-second", "Training loss by time", time, traces, smooth, "seconds")
    return [figure for figure in (by_step, by_second) if figure]


def _smooth(trace: Trace) -> Smooth:
    steps, seconds, losses = ([as_array(seed[part]) for seed in trace.seeds] for part in range(3))
    window = window_of(max(len(loss) for loss in losses))
    spread = over_seeds([smoothed(loss, window) for loss in losses])
    return Smooth(
        over_seeds(steps).mean, over_seeds(seconds).mean, over_seeds(losses).mean, spread.mean, spread.low, spread.high
    )


def _figure(
    ident: str, title: str, axis: Quantity, traces: Sequence[Trace], smooth: Sequence[Smooth], key: str
) -> Figure | None:
    xs = [getattr(one, key) * axis.factor for one in smooth]
    known = [float(x) for array in xs for x in array[np.isfinite(array)][[0, -1]] if np.isfinite(array).any()]
    if not known:
        return None
    most = points_each(len(traces))
    curves = [_curve(trace, one, x, most) for trace, one, x in zip(traces, smooth, xs, strict=True)]
    shown = [y for curve in curves for y in _extent(curve)]
    plot = Plot(ident, title, tight_scale(known), value_scale(shown), axis.heading, "training loss")
    several = any(len(trace.seeds) > 1 for trace in traces)
    note = "Smoothed, with the raw losses thin behind"
    note += "; mean over seeds, the band is their range." if several else "."
    table = _table(title, axis, traces, smooth, xs)
    return Figure(ident, title, note, line_plot(plot, curves), line_legend(curves), [table])


def _curve(trace: Trace, one: Smooth, x: Array, most: int) -> Curve:
    there = len(x)
    raw = [] if window_of(there) == 1 else pairs(x, one.raw, peaks(one.raw, most))
    places = peaks(one.mean, most // 2)
    band = []
    if len(trace.seeds) > 1:
        band = [
            (float(x[i]), float(one.low[i]), float(one.high[i]))
            for i in evenly(there, most // 3)
            if np.isfinite(x[i]) and np.isfinite(one.low[i])
        ]
    points = pairs(x, one.mean, places)
    return Curve(trace.label, trace.style, points, _hovers(trace, points), raw, band)


def _hovers(trace: Trace, points: Sequence[tuple[float, float | None]]) -> list[str]:
    """A few marks on each curve, each series at other places, so that they can be told apart without colours."""
    hovers = [""] * len(points)
    stride = max(1, len(points) // MARKS)
    for place in range(trace.style * stride // 3 % stride, len(points), stride):
        y = points[place][1]
        hovers[place] = "" if y is None else f"{trace.label}: {LOSS.text(y)}"
    return hovers


def _extent(curve: Curve) -> list[float]:
    """What the axis has to show: the line, its band, and the raw losses but for the most extreme."""
    line = [y for _, y in curve.points if y is not None] + [y for _, low, high in curve.band for y in (low, high)]
    raw = sorted(y for _, y in curve.raw if y is not None)
    return line + raw[len(raw) // 50 : len(raw) - len(raw) // 50]


def _table(title: str, axis: Quantity, traces: Sequence[Trace], smooth: Sequence[Smooth], xs: Sequence[Array]) -> Table:
    """Some places of every trace, one below the other: traces need not have their steps or seconds in common."""
    rows = []
    for trace, one, x in zip(traces, smooth, xs, strict=True):
        for place in evenly(len(x), max(6, ROWS // len(traces))):
            where = Quantity("", "", 1, axis.decimals).text(float(x[place]))
            rows.append(
                [trace.label, where, *(LOSS.text(float(values[place])) for values in (one.mean, one.low, one.high))]
            )
    note = "The smoothed loss at a few places; run.json has every step."
    return Table(title, ("label", axis.heading, "loss", "lowest", "highest"), rows, note=note)

"""Plots of curves: lines with marks, bands for ranges, level lines, names at the ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mfac.app.report.axes import HEIGHT, WIDTH, Frame
from mfac.app.report.end_labels import EndLabel, end_labels, label_room
from mfac.app.report.marks import (
    colour_class,
    dashes,
    dense_dashes,
    dense_swatch,
    legend,
    line_swatch,
    mark,
    mark_swatch,
)
from mfac.app.report.scales import Scale
from mfac.app.report.svg import path, picture, short, tag

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Curve:
    """One series on a plot, in the units of the axes.

    `raw` is drawn thin behind the line, `band` (x, low, high) pale behind both. `hovers` has a text for each point that
    gets a mark, which a pointer on it shows, and "" for the others.
    """

    label: str
    style: int
    points: Sequence[Point]
    hovers: Sequence[str] = ()
    raw: Sequence[Point] = ()
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Level:
    """A horizontal line: the value of a dense model."""

    label: str
    value: float


@dataclass(frozen=True)
class Plot:
    """What is plotted against what."""

    ident: str
    title: str
    x: Scale
    y: Scale
    x_name: str
    y_name: str


def line_plot(plot: Plot, curves: Sequence[Curve], levels: Sequence[Level] = ()) -> Markup:
    """Draws the curves over the level lines, with their names at the ends where there is room."""
    frame = Frame(plot.x, plot.y, label_room([*(curve.label for curve in curves), *(level.label for level in levels)]))
    layers = [frame.drawing(plot.x_name, plot.y_name)]
    layers += [_band(frame, curve) for curve in curves if curve.band]
    layers += [_thin(frame, curve) for curve in curves if curve.raw]
    layers += [_level(frame, number, level) for number, level in enumerate(levels)]
    layers += [_curve(frame, curve) for curve in curves]
    layers.append(_names(frame, curves, levels))
    return picture(plot.ident, plot.title, _description(plot, curves, levels), WIDTH, HEIGHT, *layers)


def scatter_plot(plot: Plot, curves: Sequence[Curve]) -> Markup:
    """Draws points without lines, and the diagonal on which both coordinates are the same."""
    frame = Frame(plot.x, plot.y)
    layers = [frame.drawing(plot.x_name, plot.y_name)]
    low, high = max(plot.x.low, plot.y.low), min(plot.x.high, plot.y.high)
    if low < high:
        ends = [frame.point(value, value) for value in (low, high)]
        layers.append(tag("path", d=path(ends), class_="dense", stroke_dasharray=dense_dashes(0)))
    layers += [_marks(frame, curve) for curve in curves]
    return picture(plot.ident, plot.title, _description(plot, curves, ()), WIDTH, HEIGHT, *layers)


def line_legend(curves: Sequence[Curve], levels: Sequence[Level] = ()) -> Markup:
    """The legend of a line plot."""
    entries = [(curve.label, line_swatch(curve.style, marks=bool(curve.hovers))) for curve in curves]
    return legend([*entries, *((level.label, dense_swatch(number)) for number, level in enumerate(levels))])


def scatter_legend(curves: Sequence[Curve], diagonal: str) -> Markup:
    """The legend of a scatter plot."""
    return legend([*((curve.label, mark_swatch(curve.style)) for curve in curves), (diagonal, dense_swatch(0))])


def _curve(frame: Frame, curve: Curve) -> Markup:
    points = [frame.point(x, y) for x, y in curve.points]
    line = tag("path", d=path(points), class_="line", stroke_dasharray=dashes(curve.style))
    return tag("g", line, class_=colour_class(curve.style)) + (_marks(frame, curve) if curve.hovers else "")


def _marks(frame: Frame, curve: Curve) -> Markup:
    points = [frame.point(x, y) for x, y in curve.points]
    pairs = zip(points, curve.hovers, strict=True)
    found = [mark(curve.style, *point, hover=text) for point, text in pairs if point and text]
    return tag("g", *found, class_=f"{colour_class(curve.style)} marks") if found else Markup("")


def _thin(frame: Frame, curve: Curve) -> Markup:
    points = [frame.point(x, y) for x, y in curve.raw]
    return tag("path", d=path(points), class_=f"{colour_class(curve.style)} raw")


def _band(frame: Frame, curve: Curve) -> Markup:
    lowest = frame.y.low
    upper = [(frame.across(x), frame.up(high)) for x, _, high in curve.band]
    lower = [(frame.across(x), frame.up(max(low, lowest))) for x, low, _ in curve.band]
    return tag("path", d=path([*upper, *reversed(lower)]) + "z", class_=f"{colour_class(curve.style)} band")


def _level(frame: Frame, number: int, level: Level) -> Markup:
    left, _, right, _ = frame.edges
    y = short(frame.up(level.value))
    return tag("path", d=f"M{short(left)} {y}H{short(right)}", class_="dense", stroke_dasharray=dense_dashes(number))


def _names(frame: Frame, curves: Sequence[Curve], levels: Sequence[Level]) -> Markup:
    left, _, right, _ = frame.edges
    labels = []
    for curve in curves:
        last = next((point for x, y in reversed(curve.points) if (point := frame.point(x, y))), None)
        if last:
            labels.append(EndLabel(curve.label, colour_class(curve.style), *last))
    labels += [EndLabel(level.label, "cd", right, frame.up(level.value)) for level in levels]
    lines = [[frame.point(x, y) for x, y in curve.points] for curve in curves]
    lines += [[(left, frame.up(level.value)), (right, frame.up(level.value))] for level in levels]
    return end_labels(labels, frame.edges, lines)


def _description(plot: Plot, curves: Sequence[Curve], levels: Sequence[Level]) -> str:
    names = ", ".join([*(curve.label for curve in curves), *(level.label for level in levels)])
    return f"{plot.y_name} against {plot.x_name} for {names}. The table below the plot has the values."

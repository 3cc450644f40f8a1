"""The plots of the page: drawn by matplotlib as inline SVG; and the tables and sections around them."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from mfac.app.report.record import SPARSITY, Quantity, Series, capital
from mfac.app.runs.folder import Record

Array = npt.NDArray[np.float64]
Plot = tuple[str, str, str, Markup]  # id, title, note and drawing
# The colours that are drawn, and the variables of style.css that replace them, so that figures follow its themes.
THEME = {
    "#1f5fbf": "c0", "#c2410c": "c1", "#0b7a5c": "c2", "#9a1fb0": "c3", "#866000": "c4", "#0a7285": "c5",
    "#be123c": "c6", "#4b5768": "c7", "#1b2430": "ink", "#55606e": "soft", "#e8ebef": "grid",
}  # fmt: skip
COLOURS, (INK, SOFT, GRID) = list(THEME)[:8], list(THEME)[8:]
MARKERS, DASHES = "os^Dv*PXph", ("-", "--", ":", "-.")
WIDTH, HEIGHT = 6.2, 3.4
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.sans-serif": ["DejaVu Sans"], "font.size": 10,
    "axes.edgecolor": SOFT, "axes.labelcolor": INK, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": SOFT, "ytick.color": SOFT, "text.color": INK,
    "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 5,
}  # fmt: skip


class Table(NamedTuple):
    """Headings and rows; the first `texts` columns are words, the others figures."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    note: str = ""


class Section(NamedTuple):
    """A heading, and below it plots and tables."""

    ident: str
    title: str
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, eq=False)
class Line:
    """The values of a series, NaN where missing, and a band from `low` to `high`."""

    series: Series
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if np.isfinite(x * y)]


def columns(entries: Sequence[Record], *keys: str) -> list[Array]:
    """The values of each key, NaN where there is none."""
    return [np.array([entry.get(key) for entry in entries], dtype=np.float64) for key in keys]


def curve_plot(
    ident: str, name: str, x: Quantity, y: Quantity, lines: Sequence[Line], note: str = "", dense: Any = None
) -> list[Plot]:
    """Lines, and a level for each dense model; nothing if no line has two points."""
    lines, dense = [line for line in lines if line.points], dense or {}
    if all(len(line.points) == 1 for line in lines):
        return []
    # High sparsities are spaced by the weights that remain, so that 95 % and 98 % stand apart.
    remaining = x is SPARSITY and 0.9 <= max(at for line in lines for at, _ in line.points) < 1
    values = [*dense.values(), *(value for line in lines for _, value in line.points)]

    def paint(axes: Any) -> None:
        for line in lines:
            at, look = 100 * (1 - line.x) if remaining else x.factor * line.x, _look(line.series)
            if line.low is not None and line.high is not None:
                low, high = y.factor * line.low, y.factor * line.high
                axes.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
            axes.plot(at, y.factor * line.y, markevery=max(1, len(at) // 10), **look)
        for number, (label, level) in enumerate(dense.items()):
            axes.axhline(y.factor * level, color=SOFT, linestyle=DASHES[2 - number % 3], label=_short(label))
        if "loss" in y.name and 0 < 30 * min(values) <= max(values):
            _logarithmic(axes, "y", "{:g}".format)
        if remaining:
            _logarithmic(axes, "x", lambda value: f"{100 - value:g}")
            axes.invert_xaxis()
        elif x is not SPARSITY:
            axes.set_xlim(left=0)
        axes.set(xlabel="sparsity (% of weights removed)" if x is SPARSITY else x.heading, ylabel=_short(y.heading))

    return [_plot(ident, capital(f"{name} by {x.name}"), note, paint)]


def _look(series: Series) -> dict[str, Any]:
    """A colour for each label; series that share a colour differ in marker and dashes."""
    return {
        "label": _short(series.label),
        "color": COLOURS[series.colour % len(COLOURS)],
        "marker": MARKERS[(series.colour + series.repeat) % len(MARKERS)],
        "linestyle": DASHES[(series.colour // len(COLOURS) + series.repeat) % len(DASHES)],
    }


def _logarithmic(axes: Any, which: str, text: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _short(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:17]}…{label[-12:]}"


def _plot(ident: str, title: str, note: str, paint: Callable[[Any], None]) -> Plot:
    """What `paint` draws, as SVG that can share a page: ids begin with `ident`, colours are the page's variables."""
    from matplotlib import style
    from matplotlib.figure import Figure

    text, height = io.StringIO(), HEIGHT
    with style.context(["default", {**STYLE, "svg.hashsalt": ident}]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that matplotlib's font lacks: the browser has them
        figure = Figure((WIDTH, height), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:  # below the axes, where it covers nothing; the figure grows with it
            columns = max(1, int(420 // (45 + 6.5 * max(map(len, labels)))))
            height += 0.2 * -(-len(labels) // columns)
            figure.set_figheight(height)
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9.5)
        figure.savefig(text, format="svg", transparent=True)
    svg = re.sub(r"^.*?<svg[^>]*>|<metadata>.*?</metadata>|<style.*?</style>", "", text.getvalue(), flags=re.S)
    svg = re.sub(r'(\bid="|url\(#|(?<=xlink:)href="#)', rf"\1{ident}-", svg).replace("xlink:", "")
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", re.sub(r"\n\s*", "\n", svg))
    svg = re.sub("|".join(THEME), lambda found: f"var(--{THEME[found[0]]})", svg)
    opening = Markup('<svg role="img" viewBox="0 0 {:g} {:g}" aria-label="{}">')
    drawing = opening.format(72 * WIDTH, 72 * height, title) + Markup(svg)
    return ident, title, note, drawing

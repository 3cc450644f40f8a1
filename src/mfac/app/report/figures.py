"""The plots of the page: drawn by matplotlib as inline SVG, each with the table of its values."""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from mfac.app.report.parts import Plot, Table, evenly
from mfac.app.report.quantities import SPARSITY, Quantity
from mfac.app.report.record import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[np.float64]
# The colours that are drawn, and the variables of style.css that replace them, so that figures follow its themes.
THEME = {
    "#1f5fbf": "c0", "#c2410c": "c1", "#0b7a5c": "c2", "#9a1fb0": "c3", "#866000": "c4", "#0a7285": "c5",
    "#be123c": "c6", "#4b5768": "c7", "#1b2430": "ink", "#55606e": "soft", "#e8ebef": "grid",
}  # fmt: skip
COLOURS, (INK, SOFT, GRID) = list(THEME)[:8], list(THEME)[8:]
MARKERS, DASHES = "os^Dv*PXph", ("-", "--", ":", "-.")
WIDTH, HEIGHT, MOST_ROWS, MOST_POINTS = 6.2, 3.4, 240, 600
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.sans-serif": ["DejaVu Sans"], "font.size": 10,
    "axes.edgecolor": SOFT, "axes.labelcolor": INK, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": SOFT, "ytick.color": SOFT, "text.color": INK,
    "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 5,
}  # fmt: skip


def array(values: Iterable[float | None]) -> Array:
    """Numbers, NaN for None."""
    return np.array(list(values), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Line:
    """The values of a series, NaN where missing; a band from `low` to `high`, and `raw` thin behind the line."""

    series: Series
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    raw: Array | None = None

    @property
    def there(self) -> npt.NDArray[np.bool_]:
        return np.isfinite(self.x * self.y)


@dataclass(frozen=True)
class Bar:
    """A bar with its range and the part of it that is drawn full; `text` follows the value at its end."""

    label: str
    value: float
    low: float
    high: float
    colour: int | None = None
    part: float | None = None
    text: str = ""


def curve_plot(
    ident: str,
    name: str,
    x: Quantity,
    y: Quantity,
    lines: Sequence[Line],
    *,
    levels: Mapping[str, float] | None = None,
    note: str = "",
    scatter: bool = False,
) -> list[Plot]:
    """Lines over horizontal levels, or points and the diagonal; bars if no line has two points, nothing if none has."""
    lines = [line for line in lines if line.there.any()]
    if not lines:
        return []
    if not scatter and all(line.there.sum() == 1 for line in lines):
        return _single_values(ident, name, x, y, lines, levels or {})
    title = name if scatter else f"{name} by {x.name}"
    several = any(line.low is not None for line in lines)
    rows = []
    for line in lines:
        columns = [line.y, line.low, line.high] if several else [line.y]
        for i in evenly(len(line.x), max(6, MOST_ROWS // len(lines))):
            texts = [y.text(None if values is None else values[i]) for values in columns]
            rows.append([line.series.label, x.text(line.x[i]), *texts])
    total = sum(len(line.x) for line in lines)
    thinned = f"{len(rows):,} of {total:,} rows, evenly spread; run.json has all of them." if len(rows) < total else ""
    headings = ["label", x.heading, y.heading, "lowest", "highest"]
    table = Table(title, headings if several else headings[:3], rows, note=thinned)

    # High sparsities are spaced by the weights that remain, so that 95 % and 98 % stand apart.
    remaining = x is SPARSITY and 0.9 <= max(line.x[line.there].max() for line in lines) < 1

    def paint(axes: "Axes") -> None:
        for line in lines:
            _draw_line(axes, line, 100 * (1 - line.x) if remaining else x.factor * line.x, y.factor, scatter)
        for number, (label, level) in enumerate((levels or {}).items()):
            axes.axhline(y.factor * level, color=SOFT, linestyle=DASHES[2 - number % 3], label=_short(label))
        ys = np.concatenate([line.y[line.there] for line in lines] + [np.array(list((levels or {}).values()))])
        if scatter or ("loss" in y.name and 0 < 30 * ys.min() <= ys.max()):
            _logarithmic(axes, "y")
        if scatter or remaining:
            _logarithmic(axes, "x", (lambda value: f"{100 - value:g}") if remaining else "{:g}".format)
        if scatter:
            axes.plot(axes.get_xlim(), axes.get_xlim(), color=SOFT, linestyle=":", label="equal", scalex=False)
        elif remaining:
            axes.invert_xaxis()
        elif x is not SPARSITY:
            axes.set_xlim(left=0)
        axes.set(xlabel="sparsity (% of weights removed)" if x is SPARSITY else x.heading, ylabel=_short(y.heading))
        _add_legend(axes)

    return [
        Plot(ident, title, note, _drawing(ident, f"{title}: {y.heading} against {x.heading}", HEIGHT, paint), table)
    ]


def bar_plot(
    ident: str, title: str, y: Quantity, bars: Sequence[Bar], levels: Mapping[str, float] | None = None, note: str = ""
) -> list[Plot]:
    """Horizontal bars over vertical levels; nothing if there are no bars."""

    def paint(axes: "Axes") -> None:
        for row, bar in enumerate(bars):
            value, low, high = (y.factor * number for number in (bar.value, bar.low, bar.high))
            colour = SOFT if bar.colour is None else COLOURS[bar.colour % len(COLOURS)]
            axes.barh(row, value, 0.6, color=colour, alpha=1 if bar.part is None else 0.3)
            axes.barh(row, y.factor * (bar.part or 0), 0.6, color=colour)
            if high > low:
                axes.errorbar(value, row, xerr=[[value - low], [high - value]], color=INK, capsize=3, linewidth=1)
            text, end = y.full(bar.value) + bar.text, (max(value, high), row)
            axes.annotate(text, end, (6, 0), textcoords="offset points", va="center")
        for number, (label, level) in enumerate((levels or {}).items()):
            axes.axvline(y.factor * level, color=SOFT, linestyle=DASHES[2 - number % 3], label=_short(label))
        axes.set_yticks(range(len(bars)), [_short(bar.label) for bar in bars], color=INK)
        axes.set_xlabel(_short(y.heading))
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.locator_params(axis="x", nbins=5)
        _add_legend(axes)

    rows = [[bar.label, *(y.text(value) for value in (bar.value, bar.low, bar.high))] for bar in bars]
    table = Table(title, ("label", y.heading, "lowest", "highest"), rows)
    drawing = _drawing(ident, f"{title}: {y.heading} as bars", 0.7 + 0.3 * len(bars), paint) if bars else Markup()
    return [Plot(ident, title, note, drawing, table)] if bars else []


def _single_values(
    ident: str, name: str, x: Quantity, y: Quantity, lines: Sequence[Line], levels: Mapping[str, float]
) -> list[Plot]:
    bars, places = [], []
    for line in lines:
        i = int(line.there.argmax())
        low, high = (float((line.y if values is None else values)[i]) for values in (line.low, line.high))
        bars.append(Bar(line.series.label, float(line.y[i]), low, high, line.series.colour))
        places.append(x.full(line.x[i]))
    title = f"{name} at {x.name} {places[0]}" if len(set(places)) == 1 else name
    return bar_plot(ident, title, y, bars, levels)


def _draw_line(axes: "Axes", line: Line, x: Array, factor: float, scatter: bool) -> None:
    """A colour for each label; series that share a colour differ in marker and dashes."""
    series = line.series
    colour = COLOURS[series.colour % len(COLOURS)]
    marker = MARKERS[(series.colour + series.repeat) % len(MARKERS)]
    dashes = DASHES[(series.colour // len(COLOURS) + series.repeat) % len(DASHES)]
    if line.low is not None and line.high is not None:
        some = evenly(len(x), MOST_POINTS)
        axes.fill_between(
            x[some], factor * line.low[some], factor * line.high[some], color=colour, alpha=0.15, linewidth=0
        )
    if line.raw is not None:
        some = _peaks(line.raw)
        axes.plot(x[some], factor * line.raw[some], color=colour, linewidth=0.6, alpha=0.35)
    some = evenly(len(x), MOST_POINTS) if scatter else _peaks(line.y)
    look: dict[str, Any] = (
        {"linestyle": "none", "alpha": 0.7} if scatter else {"linestyle": dashes, "markevery": max(1, len(some) // 10)}
    )
    axes.plot(x[some], factor * line.y[some], color=colour, marker=marker, label=_short(series.label), **look)


def _peaks(values: Array) -> list[int]:
    """Places that draw the same picture as all of them: the lowest and the highest of each stretch."""
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))
    stretches = np.array_split(np.arange(len(values)), MOST_POINTS // 2)
    return sorted({int(part[pick(values[part])]) for part in stretches for pick in (np.argmin, np.argmax)})


def _logarithmic(axes: "Axes", which: str, text: Callable[[float], str] = "{:g}".format) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _add_legend(axes: "Axes") -> None:
    """Below the axes, where it covers nothing; the figure grows with it."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = max(1, int(420 // (45 + 6.5 * max(map(len, labels)))))
        figure: Any = axes.figure
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9.5)


def _short(label: str) -> str:
    return label if len(label) <= 30 else f"{label[:17]}…{label[-12:]}"


def _drawing(ident: str, description: str, height: float, paint: Callable[["Axes"], None]) -> Markup:
    """What `paint` draws, as SVG that can share a page: ids begin with `ident`, colours are the page's variables."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("reports need matplotlib; install it with: pip install 'torch-mfac[cli]'") from None
    text = io.StringIO()
    with style.context(["default", {**STYLE, "svg.hashsalt": ident}]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that matplotlib's font lacks: the browser has them
        figure = Figure((WIDTH, height), layout="constrained")
        paint(figure.subplots())
        figure.savefig(text, format="svg", transparent=True)
    svg = re.sub(r"^.*?<svg[^>]*>|<metadata>.*?</metadata>|<style.*?</style>", "", text.getvalue(), flags=re.S)
    svg = re.sub(r'(\bid="|url\(#|(?<=xlink:)href="#)', rf"\1{ident}-", svg).replace("xlink:", "")
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", re.sub(r"\n\s*", "\n", svg))
    svg = re.sub("|".join(THEME), lambda found: f"var(--{THEME[found[0]]})", svg)
    opening = Markup('<svg role="img" viewBox="0 0 {:g} {:g}" aria-label="{}. The values are in the table.">')
    return opening.format(72 * WIDTH, 72 * figure.get_figheight(), description) + Markup(svg)

"""Horizontal bars, each with its name at the left and its value at its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mfac.app.report.axes import WIDTH
from mfac.app.report.lettering import shortened, text_width
from mfac.app.report.marks import colour_class
from mfac.app.report.scales import Scale, tight_scale
from mfac.app.report.svg import picture, short, tag

ROW, THICK, BELOW = 27.0, 15.0, 44.0
LONGEST = 17


@dataclass(frozen=True)
class Bar:
    """One bar: its length, the part of it that is drawn full (all of it where None), the range, and its text."""

    label: str
    style: int
    value: float
    text: str
    part: float | None = None
    low: float | None = None
    high: float | None = None


def bar_plot(ident: str, title: str, name: str, bars: Sequence[Bar]) -> Markup:
    """Draws the bars from zero, one below the other, over an axis with a name."""
    scale = tight_scale([max(bar.value, bar.high or 0.0) for bar in bars], count=4)
    left = 12 + max(text_width(shortened(bar.label, LONGEST)) for bar in bars)
    right = left + _room(bars, scale, left)
    bottom = 6 + ROW * len(bars)
    layers = [_axis(scale, name, left, right, bottom)]
    for row, bar in enumerate(bars):
        layers.append(_bar(bar, scale, left, right, 6 + ROW * row))
    description = f"{name}: " + "; ".join(f"{bar.label} {bar.text}" for bar in bars) + "."
    return picture(ident, title, description, WIDTH, bottom + BELOW, *layers)


def _room(bars: Sequence[Bar], scale: Scale, left: float) -> float:
    """How long the longest bar may be, so that every bar has room for its text behind it."""
    rooms = []
    for bar in bars:
        share = max(scale.place(max(bar.value, bar.high or 0.0)), 0.02)
        rooms.append((WIDTH - left - 8 - text_width(bar.text)) / share)
    return max(60.0, min(*rooms, WIDTH - left - 20))


def _axis(scale: Scale, name: str, left: float, right: float, bottom: float) -> Markup:
    ticks = scale.ticks if len(scale.ticks) <= 5 else scale.ticks[::2]
    parts = []
    for tick in ticks:
        x = left + scale.place(tick) * (right - left)
        parts.append(tag("path", d=f"M{short(x)} 4V{short(bottom + 4)}", class_="grid"))
        parts.append(tag("text", scale.label(tick), x=x, y=bottom + 18, text_anchor="middle"))
    parts.append(tag("text", name, x=(left + right) / 2, y=bottom + 37, text_anchor="middle", class_="name"))
    return Markup("").join(parts)


def _bar(bar: Bar, scale: Scale, left: float, right: float, top: float) -> Markup:
    width, middle, y = right - left, top + ROW / 2, top + (ROW - THICK) / 2
    length = max(scale.place(bar.value) * width, 1.0)
    full = length if bar.part is None else min(scale.place(bar.part) * width, length)
    parts = [
        tag("text", shortened(bar.label, LONGEST), x=left - 9, y=middle, dy="0.35em", text_anchor="end", class_="ink"),
        tag("rect", x=left, y=y, width=length, height=THICK, class_="pale"),
        tag("rect", x=left, y=y, width=full, height=THICK, class_="full"),
    ]
    end = left + length
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        low, high = (left + scale.place(value) * width for value in (bar.low, bar.high))
        parts.append(
            tag("path", d=f"M{short(low)} {middle}H{short(high)}m0-4v8M{short(low)} {middle}m0-4v8", class_="range")
        )
        end = max(end, high)
    parts.append(tag("text", bar.text, x=end + 7, y=middle, dy="0.35em", class_="ink"))
    return tag("g", *parts, class_=colour_class(bar.style))

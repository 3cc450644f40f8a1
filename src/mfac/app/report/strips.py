"""Heat strips: a row of tiles for each cell, a tile for each layer, darker where more is removed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mfac.app.report.lettering import text_width
from mfac.app.report.svg import ornament, picture, short, tag

WIDTH, LEFT, ROW, TOP, BELOW = 440.0, 54.0, 26.0, 30.0, 50.0
# The classes h0 to h8 of the style. From h6 on, figures on a tile have the colour of the ground and not of the ink; the
# style leaves out the shades between h5 and h6, on which neither could be read.
SHADES = 9
FIRST_DARK = 6


@dataclass(frozen=True)
class Row:
    """One cell: its name and the sparsity of every layer in per cent, None where the layer is not there."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Heat:
    """From which sparsity to which the shades go, in per cent; where sparsities are high, by the weights left."""

    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Heat":
        """A range of round numbers around the values; layers with nothing left count as the highest of the others."""
        below = [value for value in values if value < 100] or [0.0]
        step = next((step for step in (10, 1, 0.1, 0.01) if 100 - max(below) >= step), 0.01)
        return Heat(10.0 * math.floor(min(below) / 10), min(round(math.ceil(max(below) / step) * step, 2), 99.99))

    def shade(self, value: float) -> int:
        """Which of the shades a value has."""
        if value <= self.low or self.high <= self.low:
            return 0 if value <= self.low else SHADES - 1
        low, here, high = (self._warp(min(at, self.high)) for at in (self.low, value, self.high))
        return min(int((here - low) / (high - low) * SHADES), SHADES - 1)

    def _warp(self, value: float) -> float:
        return -math.log10(100 - value) if self.high >= 90 else value

    @property
    def key(self) -> Markup:
        """The shades from the lowest sparsity to the highest, for a legend."""
        levels = range(SHADES)
        boxes = [tag("rect", x=12 * level, width=11.5, height=12, class_=f"heat h{level}") for level in levels]
        drawing = ornament("shades", 108, 12, *boxes)
        return tag(
            "p", tag("span", f"{self.low:g} %"), drawing, tag("span", f"{self.high:g} % removed"), class_="legend"
        )


def strip(ident: str, title: str, rows: Sequence[Row], layers: Sequence[str], heat: Heat) -> Markup:
    """Draws the strips of one method; figures stand in the tiles and names below them where these are wide enough."""
    width = (WIDTH - LEFT - 8) / len(layers)
    bottom = TOP + ROW * len(rows)
    parts = [tag("text", "sparsity asked for (%)", x=4, y=16, class_="name")]
    parts += [_row(row, TOP + ROW * place, width, heat) for place, row in enumerate(rows)]
    parts += _layer_names(layers, width, bottom)
    parts.append(
        tag("text", _axis_name(layers, width), x=(LEFT + WIDTH) / 2, y=bottom + 38, text_anchor="middle", class_="name")
    )
    description = f"Per cent of weights removed in {len(layers)} layers at {len(rows)} sparsities; values in the table."
    return picture(ident, title, description, WIDTH, bottom + BELOW, *parts)


def names_fit(layers: Sequence[str]) -> bool:
    """Whether the names of the layers stand under their tiles; where not, numbers do, and the page has a list."""
    width = (WIDTH - LEFT - 8) / len(layers)
    return max(text_width(name) for name in layers) + 6 <= width


def _row(row: Row, top: float, width: float, heat: Heat) -> Markup:
    """The tiles of a shade are one path: a strip of a hundred layers is still small."""
    middle = top + ROW / 2
    by_shade: dict[int, list[str]] = {}
    figures = []
    for place, value in enumerate(row.values):
        if value is None:
            continue
        x, level = LEFT + place * width, heat.shade(value)
        gap = 2.0 if width > 8 else 0.4
        tile = f"M{short(x)} {short(top + 1)}h{short(width - gap)}v{short(ROW - 2)}h-{short(width - gap)}z"
        by_shade.setdefault(level, []).append(tile)
        if width >= 34:
            css_class = "on-dark" if level >= FIRST_DARK else "ink"
            text = _tile_text(value)
            figures.append(
                tag(
                    "text", text, x=x + (width - gap) / 2, y=middle, dy="0.35em", text_anchor="middle", class_=css_class
                )
            )
    tiles = [tag("path", d="".join(found), class_=f"heat h{level}") for level, found in sorted(by_shade.items())]
    name = tag("text", row.label, x=LEFT - 9, y=middle, dy="0.35em", text_anchor="end", class_="ink")
    return Markup("").join([name, *tiles, *figures])


def _tile_text(value: float) -> str:
    """One decimal; 100.0 only where nothing is left."""
    return f"{value:.1f}" if value >= 100 else f"{math.floor(value * 10 + 1e-6) / 10:.1f}"


def _layer_names(layers: Sequence[str], width: float, bottom: float) -> list[Markup]:
    if names_fit(layers):
        names = list(enumerate(layers))
    else:
        stride = max(1, math.ceil(26 / width))
        names = [(place, str(place + 1)) for place in range(0, len(layers), stride)]
    return [
        tag("text", name, x=LEFT + (place + 0.5) * width - 1, y=bottom + 17, text_anchor="middle")
        for place, name in names
    ]


def _axis_name(layers: Sequence[str], width: float) -> str:
    return "layer" if names_fit(layers) else "layer, by number from input to output"

"""The frame of a plot: where values fall on the drawing, grid lines, ticks and the names of the axes."""

from dataclasses import dataclass

from markupsafe import Markup

from mfac.app.report.scales import Scale
from mfac.app.report.svg import tag

WIDTH, HEIGHT = 440.0, 300.0
LEFT, TOP, BOTTOM = 54.0, 34.0, 50.0


@dataclass(frozen=True)
class Frame:
    """Two scales on a drawing; `right` is the margin that labels at the ends of lines take."""

    x: Scale
    y: Scale
    right: float = 16.0

    @property
    def edges(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the inside."""
        return LEFT, TOP, WIDTH - self.right, HEIGHT - BOTTOM

    def across(self, value: float) -> float:
        """Where a value of the x axis falls."""
        left, _, right, _ = self.edges
        return left + self.x.place(value) * (right - left)

    def up(self, value: float) -> float:
        """Where a value of the y axis falls."""
        _, top, _, bottom = self.edges
        return bottom - self.y.place(value) * (bottom - top)

    def point(self, x: float, y: float | None) -> tuple[float, float] | None:
        """Where a point falls; None where it has no value, or none that this axis can show."""
        if y is None or (self.y.log and y <= 0) or (self.x.log and x <= 0):
            return None
        return self.across(x), self.up(y)

    def drawing(self, x_name: str, y_name: str) -> Markup:
        """Grid, ticks and names. The y axis has its name above it, where it can be read without tilting the head."""
        left, _, right, bottom = self.edges
        parts = []
        for tick in self.y.ticks:
            y = self.up(tick)
            parts.append(tag("path", d=f"M{left:.0f} {y:.1f}H{right:.1f}", class_="grid"))
            parts.append(tag("text", self.y.label(tick), x=left - 8, y=y, dy="0.35em", text_anchor="end"))
        for tick in self.x.ticks:
            x = self.across(tick)
            parts.append(tag("path", d=f"M{x:.1f} {bottom:.0f}v5", class_="axis"))
            parts.append(tag("text", self.x.label(tick), x=x, y=bottom + 19, text_anchor="middle"))
        parts.append(tag("path", d=f"M{left:.0f} {bottom:.0f}H{right:.1f}", class_="axis"))
        middle = (left + right) / 2
        parts.append(tag("text", self.y.titled(y_name), x=4, y=16, class_="name"))
        parts.append(tag("text", self.x.titled(x_name), x=middle, y=HEIGHT - 8, text_anchor="middle", class_="name"))
        return Markup("").join(parts)

"""Names at the ends of lines, moved apart so that none covers another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from mfac.app.report.lettering import BOLD, END, shortened, text_width
from mfac.app.report.svg import tag

GAP = 15.0
LONGEST = 15
MOST = 12
NEAR = 30.0
CROWDED = 6  # places of lines that a name may cover; where there are more, the legend has to do
Place = tuple[float, float]
Edges = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class EndLabel:
    """A name, the class of its colour, and the point where its line ends."""

    text: str
    css_class: str
    x: float
    y: float

    @property
    def name(self) -> str:
        """The text as far as it is drawn."""
        return shortened(self.text, LONGEST)

    @property
    def width(self) -> float:
        """How wide the name is drawn, at the most."""
        return text_width(self.name, BOLD * END)


def label_room(names: Sequence[str]) -> float:
    """How wide a margin the names need; a narrow one where there are too many of them, or none."""
    if not names or len(names) > MOST:
        return 16.0
    return 16.0 + max(text_width(shortened(name, LONGEST), BOLD * END) for name in names)


def end_labels(labels: Sequence[EndLabel], edges: Edges, lines: Sequence[Sequence[Place | None]] = ()) -> Markup:
    """The labels of lines that go up to the right edge in the margin; those of lines that end early beside their ends.

    A label in the margin that had to move has a thin leader to its line. `lines` are what the others should not cover.
    """
    if len(labels) > MOST:
        return Markup("")
    _, top, right, bottom = edges
    margin = sorted((label for label in labels if right - label.x < NEAR), key=lambda label: label.y)
    taken = [place for line in lines for place in _along(line)]
    parts = []
    for label, y in zip(margin, spread([label.y for label in margin], GAP, top, bottom), strict=True):
        if abs(y - label.y) > 3:
            leader = f"M{label.x + 6:.1f} {label.y:.1f}L{right + 9:.1f} {y:.1f}"
            parts.append(tag("path", d=leader, class_="leader"))
        parts.append(_text(label, right + 12, y))
        taken += _under(label, right + 12, y)
    for label in labels:
        if right - label.x >= NEAR:
            x, y = _free_place(label, taken, edges)
            if _covered((x, y), label.width, taken) <= CROWDED:
                taken += _under(label, x, y)
                parts.append(_text(label, x, y))
    return Markup("").join(parts)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising places, moved as little as it takes to be `gap` apart and, if they all fit, between `low` and `high`."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else max(place, low))
    ceiling = high
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def _text(label: EndLabel, x: float, y: float) -> Markup:
    return tag("text", label.name, x=x, y=y, dy="0.35em", class_=f"{label.css_class} end")


def _under(label: EndLabel, x: float, y: float) -> list[Place]:
    """Places that a label covers; each counts several times, for a name over a name cannot be read at all."""
    return [(x + step * label.width / 8, y) for step in range(9)] * 5


def _free_place(label: EndLabel, taken: Sequence[Place], edges: Edges) -> Place:
    """Behind the end of the line, above or below it: where the name covers least."""
    x, y = label.x, label.y
    candidates = [(x + 12, y), (x + 4, y - 16), (x + 4, y + 17), (x + 4, y + 30)]
    candidates += [(x - label.width / 2, y - 20), (x - label.width / 2, y + 20), (x - label.width - 8, y)]
    left, top, _, bottom = edges
    inside = [place for place in candidates if place[0] >= left and top - 6 <= place[1] <= bottom - 4]
    return min(inside or candidates[:1], key=lambda place: _covered(place, label.width, taken))


def _covered(place: Place, width: float, taken: Sequence[Place]) -> int:
    return sum(1 for x, y in taken if place[0] - 4 <= x <= place[0] + width + 4 and abs(y - place[1]) < 11)


def _along(line: Sequence[Place | None]) -> list[Place]:
    """Places on a line, a few units apart."""
    places = []
    for start, end in pairwise(line):
        if start and end:
            count = max(1, int(max(abs(end[0] - start[0]), abs(end[1] - start[1])) / 5))
            shares = [step / count for step in range(count + 1)]
            places += [(start[0] + s * (end[0] - start[0]), start[1] + s * (end[1] - start[1])) for s in shares]
    return places

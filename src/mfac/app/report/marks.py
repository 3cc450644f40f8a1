"""How series are told apart: by colour, by the shape of their marks and by the dashes of their lines."""

from collections.abc import Sequence

from markupsafe import Markup

from mfac.app.report.svg import ornament, short, tag

COLOURS = 8
MANY = 8  # names in a legend, from which on they stand in columns
# Drawn from the middle of the mark, with relative moves.
SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",  # circle
    "m-3.7-3.7h7.4v7.4h-7.4z",  # square
    "m0-4.8l4.5 7.8h-9z",  # triangle
    "m0-5l5 5l-5 5l-5-5z",  # diamond
    "m0 4.8l4.5-7.8h-9z",  # triangle on its tip
    "m-4.6 0h9.2m-4.6-4.6v9.2",  # plus
    "m-3.6-3.6l7.2 7.2m0-7.2l-7.2 7.2",  # cross
    "m-4.6 0l2.3-4h4.6l2.3 4l-2.3 4h-4.6z",  # hexagon
    "m-4-4h8l-8 8h8z",  # hourglass
    "m-4.6 0h9.2m-4.6-4.6v9.2m-3.3-7.9l6.6 6.6m0-6.6l-6.6 6.6",  # star
)
DASHES = (None, "7 3", "2 2.5", "9 3 2 3", "13 4", "4 2 1 2 1 2", "5 5")
DENSE_DASHES = ("1.5 3.5", "5 4", "10 3", "10 3 1.5 3")


def colour_class(style: int) -> str:
    """The class that carries the colour of a series, in light and in dark."""
    return f"c{style % COLOURS}"


def dashes(style: int) -> str | None:
    """The dashes of a series; None: a solid line."""
    return DASHES[style % len(DASHES)]


def dense_dashes(number: int) -> str:
    """The dashes of the line of a dense model."""
    return DENSE_DASHES[number % len(DENSE_DASHES)]


def mark(style: int, x: float, y: float, hover: str = "") -> Markup:
    """The mark of a series at a point; every second one is hollow. `hover` is what a pointer on it shows."""
    children = [tag("title", hover)] if hover else []
    hollow = "o" if style % 2 else None
    return tag("path", *children, d=f"M{short(x)} {short(y)}{SHAPES[style % len(SHAPES)]}", class_=hollow)


def legend(entries: Sequence[tuple[str, Markup]]) -> Markup:
    """Swatches and names as a list of the page, which wraps on a narrow screen and keeps its size."""
    items = [tag("li", swatch, tag("span", name)) for name, swatch in entries]
    return tag("ul", *items, class_="legend many" if len(items) > MANY else "legend") if items else Markup("")


def line_swatch(style: int, marks: bool = True) -> Markup:
    """A short piece of a series' line, with its mark."""
    line = tag("path", d="M1 7H37", class_="line", stroke_dasharray=dashes(style))
    middle = tag("g", mark(style, 19, 7), class_="marks") if marks else ""
    return _swatch(tag("g", line, middle, class_=colour_class(style)))


def mark_swatch(style: int) -> Markup:
    """The mark of a series alone, for plots without lines."""
    return _swatch(tag("g", mark(style, 19, 7), class_=f"{colour_class(style)} marks"))


def dense_swatch(number: int) -> Markup:
    """A short piece of the line of a dense model."""
    return _swatch(tag("path", d="M1 7H37", class_="dense", stroke_dasharray=dense_dashes(number)))


def box_swatch(css_class: str) -> Markup:
    """A filled box, for parts of bars."""
    return _swatch(tag("rect", x=7, y=2, width=24, height=10, class_=css_class))


def _swatch(drawing: Markup) -> Markup:
    return ornament("swatch", 38, 14, drawing)

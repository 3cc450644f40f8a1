"""The parts of the page that the template lays out: tables, plots and sections."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Table:
    """Headings and rows; the first `texts` columns are words, the others figures; `strong` has (row, column) pairs."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    note: str = ""
    strong: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Plot:
    """A drawing with the table of its values."""

    ident: str
    title: str
    note: str
    drawing: Markup
    table: Table


@dataclass(frozen=True)
class Section:
    """A heading, and below it a text, commands, plots and tables."""

    ident: str
    title: str
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    text: str = ""
    commands: Sequence[str] = ()


def evenly(count: int, most: int) -> list[int]:
    """At most `most` places out of `count`, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]

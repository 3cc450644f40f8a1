"""Tables, which stand behind every plot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_ROWS = 240


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; the first `texts` columns hold words, all others figures, which align right."""

    caption: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    note: str = ""
    strong: frozenset[tuple[int, int]] = field(default_factory=frozenset)


def evenly(count: int, most: int = MOST_ROWS) -> list[int]:
    """At most `most` places out of `count`, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def thinned(table: Table, most: int = MOST_ROWS) -> Table:
    """A table with its rows thinned evenly where there are too many for a page, and a note that says so."""
    if len(table.rows) <= most:
        return table
    kept = evenly(len(table.rows), most)
    note = f"{len(kept)} of {len(table.rows):,} rows, evenly spread; run.json has all of them."
    rows = [table.rows[place] for place in kept]
    return Table(table.caption, table.headings, rows, table.texts, f"{table.note} {note}".strip())

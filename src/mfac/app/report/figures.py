"""Parts of the page: a figure is a drawing with its legend and its tables, a section a heading with figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from mfac.app.report.tables import Table


@dataclass(frozen=True)
class Figure:
    """A drawing, what it shows in a line, its legend, and the tables behind it."""

    ident: str
    title: str
    note: str
    drawing: Markup
    legend: str = ""
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    """A heading with figures and tables; `text` stands above them, or in their place where there are none."""

    ident: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    text: str = ""
    commands: Sequence[str] = ()

    @property
    def flowing(self) -> bool:
        """Whether the tables are narrow enough to stand side by side."""
        return len(self.tables) > 2 and all(len(table.headings) <= 4 for table in self.tables)

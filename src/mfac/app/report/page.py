"""The page itself: one file of HTML with its style and its drawings inside, which loads nothing from anywhere."""

import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from mfac import __version__
from mfac.app.report.prune_view import prune_sections
from mfac.app.report.record import check_runs, run_titles, unfinished
from mfac.app.report.settings_view import facts, settings_section
from mfac.app.report.summary import summaries
from mfac.app.report.train_view import train_sections
from mfac.pruning.atomic_file import replacing


def write_page(runs: list[dict[str, Any]], path: str | os.PathLike[str], title: str | None = None) -> None:
    """Writes the page of one or several runs; in full or not at all.

    Args:
        runs: what run.json holds of each; runs of the same kind share their plots.
        path: where to, usually report.html in a run's folder.
        title: the heading; None: the run's own, or that it is a comparison.

    Raises:
        ValueError: no runs, a dict that is none of ours, or a folder that is not there.
    """
    text = render_page(runs, title)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def render_page(runs: list[dict[str, Any]], title: str | None = None) -> str:
    """The page as text; the same runs give the same text.

    Raises:
        ValueError: no runs, or a dict that is none of ours.
    """
    check_runs(runs)
    titles = run_titles(runs)
    sections = [*prune_sections(runs), *train_sections(runs), settings_section(runs)]
    return _template().render(
        title=title or (titles[0] if len(runs) == 1 else f"Comparison of {len(runs)} runs"),
        version=__version__,
        style=Markup(_resource("style.css")),
        facts=facts(runs[0]) if len(runs) == 1 else titles,
        open_runs=_open_runs(runs, titles),
        summaries=summaries(runs),
        sections=sections,
    )


def _open_runs(runs: Sequence[dict[str, Any]], titles: Sequence[str]) -> list[str]:
    """A line for each run that is not finished."""
    lines = []
    for place in unfinished(runs):
        count = len(runs[place]["cells"])
        cells = {0: "no cell is complete yet", 1: "one cell is complete"}.get(count, f"{count} cells are complete")
        lines.append(f"“{titles[place]}” is not finished: {cells}; what is missing is not shown.")
    return lines


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource("page.html"))


def _resource(name: str) -> str:
    return (files("mfac.app.report") / name).read_text(encoding="utf-8")

"""The page: one HTML file with its style and figures inside, which loads nothing."""

import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from mfac import __version__
from mfac.app.report.overview import run_facts, settings_section, summaries
from mfac.app.report.pruning import prune_sections
from mfac.app.report.record import check_runs, run_titles
from mfac.app.report.training import train_sections
from mfac.pruning.atomic_file import replacing

Folders = Sequence[str | os.PathLike[str]]


def write_page(
    runs: list[dict[str, Any]],
    path: str | os.PathLike[str],
    title: str | None = None,
    folders: Folders | None = None,
) -> None:
    """Writes the page of one or several runs, completely or not at all.

    Args:
        runs: the contents of their run.json files; runs of the same kind share their plots.
        path: the file, usually report.html in a run's folder.
        title: the heading; None: the title of the run, or "Comparison of N runs".
        folders: the folder of each run, for the links to its files; None: a single run's is the folder of the page.

    Raises:
        ValueError: there are no runs, one is not the content of a run.json, or the page's folder does not exist.
        ImportError: matplotlib is not installed.
    """
    here = Path(path).absolute().parent
    text = render_page(runs, title, None if folders is None else [os.path.relpath(folder, here) for folder in folders])
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def render_page(runs: list[dict[str, Any]], title: str | None = None, folders: Folders | None = None) -> str:
    """The page as text, the same for the same runs; `folders` are relative to the folder of the page."""
    check_runs(runs)
    if folders is None:
        folders = ["."] if len(runs) == 1 else []
    links: list[str | None] = [quote(f"{os.fspath(folder)}/").removeprefix("./") for folder in folders] or [None] * len(
        runs
    )
    runs = [
        {**run, "title": title, "folder": link} for run, title, link in zip(runs, run_titles(runs), links, strict=True)
    ]
    kinds = {run["kind"] for run in runs}
    sections = [
        *(prune_sections(runs) if "prune" in kinds else []),
        *(train_sections(runs) if "train" in kinds else []),
        settings_section(runs),
    ]
    facts = run_facts(runs[0])
    return _template().render(
        title=title or (runs[0]["title"] if len(runs) == 1 else f"Comparison of {len(runs)} runs"),
        version=__version__,
        style=Markup(_resource("style.css")),
        facts=[run["title"] for run in runs] if len(runs) > 1 else list(facts.values()),
        open_runs=[run for run in runs if not run.get("finished")],
        summaries=summaries(runs),
        sections=[section for section in sections if section.plots or section.tables],
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource("page.html"))


def _resource(name: str) -> str:
    return (files("mfac.app.report") / name).read_text(encoding="utf-8")

"""The page: one HTML file with its style and figures inside, which loads nothing."""

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mfac import __version__
from mfac.app.report.record import completed
from mfac.app.report.sections import result_sections, run_facts, settings_section, summaries
from mfac.app.runs.folder import Record, is_report, writing


def write_page(
    runs: list[Record], path: Path, title: str | None = None, folders: Sequence[Path] = (), force: bool = False
) -> None:
    """Writes the page of one or several runs (the contents of run.json files), completely or not at all.

    `folders` are those of the runs, for the links to their files; by default the folder of the page. A file that is not
    such a page is replaced only with `force`.
    """
    if path.exists() and not is_report(path) and not force:
        remedy = "move it, choose another file (--out), or overwrite it (mfac report --force)"
        raise FileExistsError(f"{path} exists and is not a report of mfac; {remedy}")
    text = render_page(runs, title, [os.path.relpath(folder, path.absolute().parent) for folder in folders])
    with writing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def render_page(runs: list[Record], title: str | None = None, folders: Sequence[str] = ()) -> str:
    """The page as text, the same for the same runs; `folders` are relative to the folder of the page."""
    known = completed(runs)
    for run, folder in zip(known, folders or ["."] * len(runs), strict=True):
        run["folder"] = quote(f"{folder}/").removeprefix("./")
    template, style = ((files("mfac.app.report") / name).read_text("utf-8") for name in ("page.html", "style.css"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title or (known[0]["title"] if len(runs) == 1 else f"Comparison of {len(runs)} runs"),
        version=__version__,
        style=Markup(style),
        facts=[run["title"] for run in known] if len(runs) > 1 else list(run_facts(known[0]).values())[:-2],
        unfinished=[run for run in known if not run["finished"]],
        summaries=summaries(known),
        sections=[one for one in (*result_sections(known), settings_section(known)) if one.plots or one.tables],
    )

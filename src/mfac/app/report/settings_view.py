"""What the runs were made with: commands, settings, versions and the machine."""

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from mfac.app.report.figures import Section
from mfac.app.report.quantities import MISSING, duration
from mfac.app.report.record import Record, run_titles, series_of, task_of
from mfac.app.report.tables import Table

ENVIRONMENT = {
    "mfac": "mfac", "torch": "PyTorch", "python": "Python", "system": "system", "processor": "processor",
    "device": "device", "threads": "threads", "memory_gib": "memory (GiB)",
}  # fmt: skip


def settings_section(runs: Sequence[Record]) -> Section:
    """One column a run, so that differences stand side by side."""
    titles = run_titles(runs)
    headings = titles if len(runs) > 1 else ["value"]
    tables = [
        _side_by_side("Runs", headings, [_run_facts(run) for run in runs]),
        _side_by_side("Settings", headings, [dict(run.get("settings") or {}) for run in runs]),
        *_optimizer_settings(runs),
        _side_by_side("Versions and machine", headings, [_environment(run) for run in runs]),
    ]
    commands = list(dict.fromkeys(str(run["command"]) for run in runs if run.get("command")))
    return Section(
        "settings", "Settings and versions", tables=[table for table in tables if table.rows], commands=commands
    )


def facts(run: Record) -> list[str]:
    """The line below the title: task, size, begin and length of a run."""
    known = _run_facts(run)
    return [known[key] for key in ("task", "model", "started", "took") if known.get(key)]


def _run_facts(run: Record) -> dict[str, str]:
    task, model = task_of(run), run.get("model") or {}
    weights, tensors = model.get("weights"), model.get("tensors")
    known = {
        "task": str(task.get("name") or ""),
        "source": str(task.get("source") or ""),
        "model": "" if weights is None else f"{weights:,} weights" + (f" in {tensors:,} tensors" if tensors else ""),
        "started": _moment(run.get("started")),
        "finished": _moment(run.get("finished")) or "not finished",
        "took": _took(run),
    }
    return {key: text for key, text in known.items() if text}


def _took(run: Record) -> str:
    begin, end = _parsed(run.get("started")), _parsed(run.get("finished"))
    return duration(max(0.0, (end - begin).total_seconds())) if begin and end else ""


def _moment(text: str | None) -> str:
    moment = _parsed(text)
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment else str(text or "")


def _parsed(text: str | None) -> datetime | None:
    """A moment in UTC; None where the text is none."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _environment(run: Record) -> dict[str, Any]:
    environment = run.get("environment") or {}
    ordered = [*ENVIRONMENT, *(key for key in environment if key not in ENVIRONMENT)]
    return {ENVIRONMENT.get(key, key): environment[key] for key in ordered if key in environment}


def _optimizer_settings(runs: Sequence[Record]) -> list[Table]:
    """The settings of each optimizer; they are the same for all its seeds."""
    series = series_of(runs, "train")
    if not series:
        return []
    chosen = [dict(one.cells[0].get("settings") or {}) for one in series]
    return [_side_by_side("Settings of the optimizers", [one.label for one in series], chosen)]


def _side_by_side(caption: str, headings: Sequence[str], columns: Sequence[dict[str, Any]]) -> Table:
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [[str(key), *(_value(column.get(key, MISSING)) for column in columns)] for key in keys]
    return Table(caption, ("", *headings), rows, texts=1 + len(headings))


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_value(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)

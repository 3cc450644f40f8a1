"""The result in a sentence and a small table, and the settings that the runs were made with."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from markupsafe import Markup

from mfac.app.report.figures import Section, Table
from mfac.app.report.record import LOSS, MISSING, Quantity, Series, by_measure, capital, percent, series_of
from mfac.app.runs.format import Record

Summary = tuple[str, Table | None]
Values = dict[str, dict[float | None, list[float]]]  # by label and sparsity; None: at the end of training
NAMED, USUAL = 4, 0.9  # how many methods the sentence names, and at which sparsity if most methods have it


def summaries(runs: Sequence[Record]) -> list[Summary]:
    """A sentence and a table for the pruning and for the training of each measure."""
    kinds = [by_measure(series_of(runs, kind)).items() for kind in ("prune", "train")]
    found = [_summary(measure, group) for groups in kinds for measure, group in groups]
    return found or [("No cell is complete yet.", None)]


def _summary(measure: Quantity, series: Sequence[Series]) -> Summary:
    measured = any(cell["measure"] is not None for one in series for cell in one.cells)
    quantity, key = (measure, "measure") if measured else (LOSS, "loss")
    higher = measured and series[0].run["task"]["higher_is_better"]
    values: Values = {one.label: {} for one in series}
    for label, cell in ((one.label, cell) for one in series for cell in one.cells):
        if cell[key] is not None:
            values[label].setdefault(cell["asked"], []).append(cell[key])
    counts = Counter(at for found in values.values() for at in found)
    if not counts:
        return "No cell has a finite value.", None
    at = max(counts, key=lambda at: (counts[at], -abs((at or USUAL) - USUAL)))
    lists = {label: found[at] for label, found in values.items() if at in found}
    seeds, dense = max(map(len, lists.values())), {one.run["dense"].get(key) for one in series} - {None}
    verb = "reaches" if at is None else "keeps" if higher else "has"
    sentence = "At the end of training " if at is None else f"At {percent(at)} sparsity "
    sentence += _ranking({label: fmean(found) for label, found in lists.items()}, quantity, higher, verb)
    sentence += f" (mean over {seeds} seeds)" if seeds > 1 else ""
    sentence += f"; dense {quantity.text(dense.pop(), unit=True)}" if len(dense) == 1 else ""
    return f"{sentence}.", _summary_table(quantity, higher, values, sorted(counts, key=lambda at: at or 0))


def _summary_table(quantity: Quantity, higher: bool, values: Values, columns: Sequence[float | None]) -> Table:
    rows = [[label] for label in values]
    for at in columns:
        lists = [found.get(at, []) for found in values.values()]
        means = [fmean(found) for found in lists if found]
        best = (max(means) if higher else min(means)) if len(means) > 1 else None
        for row, found in zip(rows, lists, strict=True):
            spread = f" ({quantity.text(min(found))} to {quantity.text(max(found))})" if len(found) > 1 else ""
            text = quantity.text(fmean(found)) + spread if found else MISSING
            row.append(Markup("<strong>{}</strong>").format(text) if found and fmean(found) == best else text)
    headings = ("label", *("at the end" if at is None else percent(at) for at in columns))
    note = "The best of each column is bold." if len(values) > 1 else ""
    return Table(capital(quantity.heading), headings, rows, note=note)


def _ranking(values: Mapping[str, float], quantity: Quantity, higher: bool, verb: str) -> str:
    """mfac keeps 95.1 % accuracy, magnitude 82.0 %, and 3 more down to 20.1 % (random)."""
    ranked = sorted(values.items(), key=lambda pair: -pair[1] if higher else pair[1])
    (first, text), *others = [(label, quantity.text(value, unit=True)) for label, value in ranked]
    parts = [f"{first} {verb} {text} {quantity.name}" if quantity.unit else f"{first} {verb} {quantity.name} {text}"]
    parts += [f"{label} {text}" for label, text in others[: NAMED - 1]]
    if len(ranked) > NAMED:
        parts.append(f"and {len(ranked) - NAMED} more down to {others[-1][1]} ({others[-1][0]})")
    return ", ".join(parts)


def settings_section(runs: Sequence[Record]) -> Section:
    """Commands, settings, versions and machine: one column per run, so that differences stand side by side."""
    titles = [run["title"] for run in runs] if len(runs) > 1 else ["value"]
    optimizers = {one.label: one.cells[0]["settings"] for one in series_of(runs, "train")}
    tables = [
        _side_by_side("Runs", titles, [run_facts(run) for run in runs]),
        _side_by_side("Settings", titles, [run["settings"] for run in runs]),
        _side_by_side("Settings of the optimizers", list(optimizers), list(optimizers.values())),
        _side_by_side("Versions and machine", titles, [run["environment"] for run in runs]),
    ]
    return Section("settings", "Settings and versions", tables=[one for one in tables if one.rows])


def run_facts(run: Record) -> dict[str, str]:
    """The task, the model, and the times of a run."""
    begin, end = (datetime.fromisoformat(run[key]) if run[key] else None for key in ("started", "finished"))
    facts = {
        "task": run["task"]["name"],
        "source": run["task"]["source"],
        "model": f"{run['model']['weights']:,} weights in {run['model']['tensors']:,} tensors",
        "started": f"{begin:%Y-%m-%d %H:%M %Z}",
        "command": run["command"],
        "took": str(end - begin) if begin and end else "not finished",
    }
    return {key: text for key, text in facts.items() if text}


def _side_by_side(caption: str, headings: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for key in dict.fromkeys(key for column in columns for key in column):
        values = [column.get(key, MISSING) for column in columns]
        rows.append([key, *(value if isinstance(value, str) else json.dumps(value) for value in values)])
    return Table(caption, ("", *headings), rows, texts=1 + len(headings))

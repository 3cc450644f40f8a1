"""The result in a sentence and a small table, and the settings that the runs were made with."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from mfac.app.report.figures import Section, Table
from mfac.app.report.quantities import LOSS, MISSING, Quantity, capital, percent
from mfac.app.report.record import Record, Series, by_measure, series_of

Summary = tuple[str, Table | None]
Values = Mapping[str, Mapping[float | None, Sequence[float]]]  # by label and sparsity; None: at the end of training
NAMED, USUAL = 4, 0.9  # how many methods the sentence names, and at which sparsity if most methods have it


def summaries(runs: Sequence[Record]) -> list[Summary]:
    """A sentence and a table for the pruning and for the training of each measure."""
    kinds = [by_measure(series_of(runs, kind)).items() for kind in ("prune", "train")]
    found = [_summary(measure, group) for groups in kinds for measure, group in groups]
    return found or [("No cell is complete yet.", None)]


def _summary(measure: Quantity, series: Sequence[Series]) -> Summary:
    """Of the measure, or of the loss where there is none."""
    measured = any(cell["measure"] is not None for one in series for cell in one.cells)
    quantity, key = (measure, "measure") if measured else (LOSS, "loss")
    higher = measured and bool(series[0].run["task"].get("higher_is_better", True))
    values: dict[str, dict[float | None, list[float]]] = {one.label: {} for one in series}
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
    rows, best = [[label] for label in values], set()
    for column, at in enumerate(columns, 1):
        lists = [found.get(at, ()) for found in values.values()]
        means = [fmean(found) if found else None for found in lists]
        known = [mean for mean in means if mean is not None]
        for row, (mean, found) in enumerate(zip(means, lists, strict=True)):
            spread = f" ({quantity.text(min(found))} to {quantity.text(max(found))})" if len(found) > 1 else ""
            rows[row].append(quantity.text(mean) + spread)
            if len(known) > 1 and mean == (max(known) if higher else min(known)):
                best.add((row, column))
    headings = ("label", *("at the end" if at is None else percent(at) for at in columns))
    note = "The best of each column is bold." if best else ""
    return Table(capital(quantity.heading), headings, rows, 1, note, frozenset(best))


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
    optimizers = series_of(runs, "train")
    chosen = [one.cells[0].get("settings") or {} for one in optimizers]
    tables = [
        _side_by_side("Runs", titles, [run_facts(run) for run in runs]),
        _side_by_side("Settings", titles, [run.get("settings") or {} for run in runs]),
        _side_by_side("Settings of the optimizers", [one.label for one in optimizers], chosen),
        _side_by_side("Versions and machine", titles, [run.get("environment") or {} for run in runs]),
    ]
    commands = list(dict.fromkeys(str(run["command"]) for run in runs if run.get("command")))
    return Section("settings", "Settings and versions", tables=[one for one in tables if one.rows], commands=commands)


def run_facts(run: Record) -> dict[str, str]:
    """The task, the model, and the times of a run."""
    weights, tensors = ((run.get("model") or {}).get(key) for key in ("weights", "tensors"))
    begin, end = (datetime.fromisoformat(run[key]) if run.get(key) else None for key in ("started", "finished"))
    facts = {
        "task": run["task"].get("name"),
        "source": run["task"].get("source"),
        "model": weights and f"{weights:,} weights" + (f" in {tensors:,} tensors" if tensors else ""),
        "started": begin and f"{begin:%Y-%m-%d %H:%M %Z}",
        "took": str(end - begin) if begin and end else "not finished",
    }
    return {key: str(text) for key, text in facts.items() if text}


def _side_by_side(caption: str, headings: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> Table:
    """Texts as they are, other values as run.json has them."""
    keys = dict.fromkeys(key for column in columns for key in column)
    cells = [[column.get(key, MISSING) for column in columns] for key in keys]
    texts = [[cell if isinstance(cell, str) else json.dumps(cell) for cell in row] for row in cells]
    rows = [[key, *row] for key, row in zip(keys, texts, strict=True)]
    return Table(caption, ("", *headings), rows, texts=1 + len(headings))

"""The result in a sentence and a small table, and the settings that the runs were made with."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from mfac.app.report.parts import Section, Table
from mfac.app.report.quantities import LOSS, MISSING, Quantity, capital, measure_quantity, percent
from mfac.app.report.record import Record, Series, asked_of, by_measure, last_entry, series_of, task_of

Summary = tuple[str, Table | None]
NAMED = 4  # methods that the sentence names
USUAL = 0.9  # the sparsity of the sentence, where most methods have it


def summaries(runs: Sequence[Record]) -> list[Summary]:
    """A sentence and a table for the pruning and for the training of each measure."""
    found = [_pruning(name, group) for name, group in by_measure(series_of(runs, "prune")).items()]
    found += [_training(name, group) for name, group in by_measure(series_of(runs, "train")).items()]
    return found or [("No cell is complete yet.", None)]


def _pruning(name: str, series: Sequence[Series]) -> Summary:
    quantity, key, higher = _yardstick(name, series)
    values = {
        one.label: {asked_of(cell): cell[key] for cell in one.cells if cell.get(key) is not None} for one in series
    }
    asked = sorted({asked_of(cell) for one in series for cell in one.cells})
    rows = [[label, *(quantity.text(found.get(at)) for at in asked)] for label, found in values.items()]
    best = set()
    for column, at in enumerate(asked, 1):
        known = [found[at] for found in values.values() if at in found]
        target = (max if higher else min)(known, default=None)
        best |= {
            (row, column) for row, found in enumerate(values.values()) if len(known) > 1 and found.get(at) == target
        }
    dense = {level for one in series if (level := (one.run.get("dense") or {}).get(key)) is not None}
    after = f"; dense {quantity.full(*dense)}" if len(dense) == 1 else ""
    caption = f"{capital(quantity.heading)} by sparsity{after}"
    note = "The best of each column is bold." if best else ""
    table = Table(caption, ("method", *map(percent, asked)), rows, 1, note, frozenset(best))
    counts = Counter(at for found in values.values() for at in found)
    if not counts:
        return "No cell has a finite value.", table
    at = max(counts, key=lambda at: (counts[at], -abs(at - USUAL)))
    at_that = {label: found[at] for label, found in values.items() if at in found}
    return (
        f"At {percent(at)} sparsity {_ranking(at_that, quantity, higher, 'keeps' if higher else 'has')}{after}.",
        table,
    )


def _training(name: str, series: Sequence[Series]) -> Summary:
    quantity, key, higher = _yardstick(name, series)
    rows, means = [], dict[str, float]()
    for one in series:
        known = [value for cell in one.cells if (value := last_entry(cell).get(key)) is not None]
        steps = max(cell.get("steps") or len(cell.get("losses") or []) for cell in one.cells)
        figures = [sum(known) / len(known), min(known), max(known)] if known else [None] * 3
        rows.append([one.label, str(len(one.cells)), f"{steps:,}", *map(quantity.text, figures)])
        means |= {one.label: sum(known) / len(known)} if known else {}
    headings = ("optimizer", "seeds", "steps", quantity.heading, "lowest", "highest")
    table = Table(f"{capital(quantity.heading)} at the end", headings, rows)
    if not means:
        return "No training has a finite value at its end.", table
    seeds = max(len(one.cells) for one in series)
    over = f" (mean over {seeds} seeds)" if seeds > 1 else ""
    return f"At the end of training {_ranking(means, quantity, higher, 'reaches')}{over}.", table


def _yardstick(name: str, series: Sequence[Series]) -> tuple[Quantity, str, bool]:
    """The measure, or the loss where there is none: its quantity, its key, and whether higher is better."""
    measures = [last_entry(cell).get("measure") for one in series for cell in one.cells]
    if any(value is not None for value in measures):
        return measure_quantity(name, measures), "measure", bool(task_of(series[0].run).get("higher_is_better", True))
    return LOSS, "loss", False


def _ranking(values: Mapping[str, float], quantity: Quantity, higher: bool, verb: str) -> str:
    """mfac keeps 95.1 % accuracy, magnitude 82.0 %, and 3 more down to 20.1 % (random)."""
    ranked = sorted(values.items(), key=lambda pair: -pair[1] if higher else pair[1])
    texts = [f"{label} {quantity.full(value)}" for label, value in ranked]
    label, value = ranked[0]
    noun = f"{quantity.full(value)} {quantity.name}" if quantity.unit else f"{quantity.name} {quantity.text(value)}"
    texts[0] = f"{label} {verb} {noun}"
    more = f", and {len(texts) - NAMED} more down to {quantity.full(ranked[-1][1])} ({ranked[-1][0]})"
    return ", ".join(texts[:NAMED]) + (more if len(texts) > NAMED else "")


def settings_section(runs: Sequence[Record]) -> Section:
    """Commands, settings, versions and machine: one column per run, so that differences stand side by side."""
    titles = [run["title"] for run in runs] if len(runs) > 1 else ["value"]
    optimizers = series_of(runs, "train")
    tables = [
        _side_by_side("Runs", titles, [run_facts(run) for run in runs]),
        _side_by_side("Settings", titles, [run.get("settings") or {} for run in runs]),
        _side_by_side(
            "Settings of the optimizers",
            [one.label for one in optimizers],
            [one.cells[0].get("settings") or {} for one in optimizers],
        ),
        _side_by_side("Versions and machine", titles, [run.get("environment") or {} for run in runs]),
    ]
    commands = list(dict.fromkeys(str(run["command"]) for run in runs if run.get("command")))
    tables = [table for table in tables if table.rows]
    return Section("settings", "Settings and versions", tables=tables, commands=commands)


def run_facts(run: Record) -> dict[str, str]:
    """The task, the model, and the times of a run."""
    task, model = task_of(run), run.get("model") or {}
    begin, end = _moment(run.get("started")), _moment(run.get("finished"))
    tensors = f" in {model['tensors']:,} tensors" if model.get("tensors") else ""
    facts = {
        "task": str(task.get("name") or ""),
        "source": str(task.get("source") or ""),
        "model": f"{model['weights']:,} weights{tensors}" if model.get("weights") else "",
        "started": f"{begin:%Y-%m-%d %H:%M} UTC" if begin else "",
        "finished": f"{end:%Y-%m-%d %H:%M} UTC" if end else "not finished",
        "took": str(end - begin) if begin and end else "",
    }
    return {key: text for key, text in facts.items() if text}


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(timezone.utc) if text else None


def _side_by_side(caption: str, headings: Sequence[str], columns: Sequence[Mapping[str, Any]]) -> Table:
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(_value(column[key]) if key in column else MISSING for column in columns)] for key in keys]
    return Table(caption, ("", *headings), rows, texts=1 + len(headings))


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""What the page says: the result in a sentence and a small table, what pruning and training gave, and the settings."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from statistics import fmean
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from mfac.app.report.figures import Line, Plot, Section, Table, columns, curve_plot
from mfac.app.report.record import LOSS, MISSING, SPARSITY, Quantity, Series, by_measure, capital, percent, series_of
from mfac.app.runs.folder import Record

STEP, TRAINING_LOSS, MOST_POINTS = Quantity("step", decimals=0), Quantity("training loss"), 100
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


def result_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the pruning runs and of the training runs."""
    pruned, trained = series_of(runs, "prune"), series_of(runs, "train")
    quality, evaluations = [], []
    for number, (quantity, group) in enumerate(by_measure(pruned).items()):
        quality += _by_sparsity(f"prune-measure-{number}", quantity, "measure", group)
    for number, (quantity, group) in enumerate(by_measure(trained).items()):
        evaluations += _trace_plots(f"eval-measure-{number}", quantity.name, quantity, group, "evaluations", "measure")
    evaluations += _trace_plots("eval-loss", "evaluation loss", LOSS, trained, "evaluations", "loss")
    losses = _trace_plots("training-loss", "training loss", TRAINING_LOSS, trained, "training", "loss")
    return [
        Section("quality", "What pruning costs", quality + _by_sparsity("prune-loss", LOSS, "loss", pruned)),
        Section("layers", "Sparsity by layer, % of weights removed", tables=_layer_tables(pruned)),
        Section("steps", "Step by step to the highest sparsity", tables=_step_tables(pruned)),
        Section("tuning", "Training between the steps", _tuning(pruned)),
        Section("prune-cells", "All cells of pruning", tables=_cell_table(pruned)),
        Section("evaluations", "Evaluations", evaluations),
        Section("training", "Training loss", losses),
        Section("train-cells", "All trainings", tables=_cell_table(trained)),
    ]


def _by_sparsity(ident: str, quantity: Quantity, key: str, series: Sequence[Series]) -> list[Plot]:
    lines, dense = [], dict[float, dict[str, None]]()
    for one in series:
        cells = sorted(one.cells, key=lambda cell: cell["sparsity"])
        lines.append(Line(one, *columns(cells, "sparsity", key)))
        if (level := one.run["dense"].get(key)) is not None:
            dense.setdefault(level, {})[one.run["title"]] = None
    levels = {f"dense · {', '.join(titles)}" if len(dense) > 1 else "dense": level for level, titles in dense.items()}
    return curve_plot(ident, quantity.name, SPARSITY, quantity, lines, dense=levels)


def _layer_tables(series: Sequence[Series]) -> list[Table]:
    shaded, tables = Markup('<i style="--share: {:.0f}%">{}</i>'), []
    for one in series:
        rows = []
        for layers in zip(*(cell["layers"] for cell in one.cells), strict=True):
            name, weights = layers[0]["name"], layers[0]["weights"]
            shares = [1 - layer["kept"] / weights for layer in layers]
            rows.append([name, f"{weights:,}", *(shaded.format(60 * s**4, SPARSITY.text(s)) for s in shares)])
        headings = ("layer", "weights", *(f"at {percent(cell['asked'])}" for cell in one.cells))
        tables.append(Table(one.label, headings, rows))
    return tables


def _step_tables(series: Sequence[Series]) -> list[Table]:
    tables = []
    for one in series:
        steps = max(one.cells, key=lambda cell: cell["sparsity"])["steps"]
        rows = []
        for step in steps:
            before, after = step["loss_before"], step["loss_after"]
            grown = None if before is None or after is None else after - before
            rows.append([SPARSITY.text(step["sparsity"]), *map(LOSS.text, (step["predicted_increase"], grown, after))])
        headings = ("sparsity (%)", "predicted increase of the loss", "true increase", "loss on a few batches")
        tables += [Table(one.label, headings, rows)] if rows else []  # no steps: nothing was removed
    return tables


def _tuning(series: Sequence[Series]) -> list[Plot]:
    alone = []
    for one in series:
        for number, cell in enumerate(cell for cell in one.cells if cell["training"]):
            label = one.label if len(one.cells) == 1 else f"{one.label} at {percent(cell['asked'])}"
            alone.append(replace(one, label=label, repeat=one.repeat + number, cells=[cell]))
    return _trace_plots("tuning-loss", "training loss", TRAINING_LOSS, alone, "training", "loss")


def _trace_plots(
    ident: str, name: str, quantity: Quantity, series: Sequence[Series], field: str, key: str
) -> list[Plot]:
    """Values by step and by time: the mean over seeds, and over stretches of a long training."""
    by_step, by_time, over = [], [], dict[str, None]()
    for one in series:
        seeds = [columns(cell[field], "step", "second", key) for cell in one.cells]
        steps = np.unique(np.concatenate([seed[0] for seed in seeds]))
        width = max(1, -(-len(steps) // MOST_POINTS))
        table = np.full((3, len(seeds), -(-len(steps) // width) * width), np.nan)
        for row, seed in enumerate(seeds):
            table[:, row, np.searchsorted(steps, seed[0])] = seed
        known = np.ma.masked_invalid(table).reshape(3, len(seeds), -1, width)
        at, seconds, mean = known.mean(axis=(1, 3)).filled(np.nan)
        low, high = (edge.filled(np.nan) for edge in (known[2].min(axis=(0, 2)), known[2].max(axis=(0, 2))))
        line = Line(one, at, mean, low, high) if len(seeds) * width > 1 else Line(one, at, mean)
        by_step.append(line)
        by_time.append(replace(line, x=seconds))
        over |= {text: None for text, count in (("seeds", len(seeds)), ("neighbouring values", width)) if count > 1}
    note = f"Mean over {' and '.join(over)}; the band is the range." if over else ""
    plots = curve_plot(f"{ident}-step", name, STEP, quantity, by_step, note=note)
    time = Quantity.scaled("time", (x for line in by_time for x, _ in line.points), "s")
    return plots + curve_plot(f"{ident}-second", name, time, quantity, by_time, note=note)


def _cell_table(series: Sequence[Series]) -> list[Table]:
    """One row per cell with links to its files; columns that no cell has are left out."""
    cells = [(one, cell) for one in series for cell in one.cells]
    time = Quantity.scaled("time", (cell["time"] for _, cell in cells), "s")
    known = {
        "asked": Quantity("asked for", "%", 100, 1),
        "sparsity": SPARSITY,
        "seed": Quantity("seed", decimals=0),
        "step_count": Quantity("steps", decimals=0),
        "last_loss": Quantity("last training loss"),
        "loss": LOSS,
        **{f"measure {group[0].run['task']['measure']}": quantity for quantity, group in by_measure(series).items()},
        "time": time,
        "gradient_seconds": time._replace(name="gradients"),
        "peak_bytes": Quantity.scaled("peak memory", (cell["peak_bytes"] for _, cell in cells), "bytes"),
        "compact": Quantity.scaled("compact file", (cell.get("compact") for _, cell in cells), "bytes"),
        "ratio": Quantity("times smaller"),
    }
    shown = [(key, one) for key, one in known.items() if any(cell.get(key) is not None for _, cell in cells)]
    rows = [
        [one.label, *(quantity.text(cell.get(key)) for key, quantity in shown), _links(one, cell)]
        for one, cell in cells
    ]
    headings = ("label", *(quantity.heading for _, quantity in shown), "files")
    return [Table("One row per cell", headings, rows)] if rows else []


def _links(one: Series, cell: Record) -> str:
    link, files = Markup('<a href="{}">{}</a>'), cell["files"].items()
    return Markup(", ").join(link.format(one.run["folder"] + quote(path), name) for name, path in files)


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

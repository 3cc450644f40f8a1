"""What the page says of pruning and training: quality, layers, steps, losses, costs and all cells."""

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from mfac.app.report.figures import Line, Plot, Section, Table, bar_plot, columns, curve_plot
from mfac.app.report.quantities import LOSS, MISSING, SIZES, SPARSITY, STEP, TIMES, Quantity, capital, percent, scaled
from mfac.app.report.record import Record, Series, by_measure, series_of

TRAINING_LOSS, STEP_LOSS = Quantity("training loss"), Quantity("loss on a few training batches")
PREDICTED, TRUE = Quantity("predicted increase"), Quantity("true increase of the loss")
MOST_POINTS = 100


def prune_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the pruning runs."""
    series = series_of(runs, "prune")
    plots = []
    for number, (quantity, group) in enumerate(by_measure(series).items()):
        plots += _by_sparsity(f"prune-measure-{number}", quantity, "measure", group)
    plots += _by_sparsity("prune-loss", LOSS, "loss", series)
    shading = "Per cent of the weights that were removed; the stronger the colour, the more."
    return [
        Section("quality", "What pruning costs", plots),
        Section("layers", "Sparsity by layer", tables=_layer_tables(series), text=shading),
        Section("steps", "Step by step", _predictions(series) + _paths(series)),
        Section("tuning", "Training between the steps", _tuning(series)),
        Section("prune-cost", "Time and memory of pruning", _costs("prune", series)),
        Section("prune-cells", "All cells", tables=_cell_table(series)),
    ]


def train_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the training runs."""
    series = series_of(runs, "train")
    plots = []
    for number, (quantity, group) in enumerate(by_measure(series).items()):
        name = capital(quantity.name)
        plots += _trace_plots(f"eval-measure-{number}", name, quantity, group, "evaluations", "measure")
    plots += _trace_plots("eval-loss", "Evaluation loss", LOSS, series, "evaluations", "loss")
    losses = _trace_plots("training-loss", "Training loss", TRAINING_LOSS, series, "training", "loss")
    return [
        Section("evaluations", "Evaluations", plots),
        Section("training", "Training loss", losses),
        Section("train-cost", "Time and memory of training", _costs("train", series)),
        Section("train-cells", "All trainings", tables=_cell_table(series)),
    ]


def _by_sparsity(ident: str, quantity: Quantity, key: str, series: Sequence[Series]) -> list[Plot]:
    lines, dense = [], dict[float, dict[str, None]]()
    for one in series:
        cells = [cell for cell in one.cells if cell.get("sparsity") is not None]
        cells.sort(key=lambda cell: cell["sparsity"])
        lines.append(Line(one, *columns(cells, "sparsity", key)))
        if (level := one.run["dense"].get(key)) is not None:
            dense.setdefault(level, {})[one.run["title"]] = None
    levels = {f"dense · {', '.join(titles)}" if len(dense) > 1 else "dense": level for level, titles in dense.items()}
    return curve_plot(ident, capital(quantity.name), SPARSITY, quantity, lines, levels)


def _layer_tables(series: Sequence[Series]) -> list[Table]:
    tables = []
    for one in series:
        cells = [cell for cell in one.cells if cell.get("layers")]
        weights = {layer["name"]: layer["weights"] for cell in cells for layer in cell["layers"] if layer["weights"]}
        kept = [{layer["name"]: layer.get("kept") for layer in cell["layers"]} for cell in cells]
        rows = [[name, f"{n:,}", *(_shaded(found.get(name), n) for found in kept)] for name, n in weights.items()]
        headings = ("layer", "weights", *(f"at {percent(cell['asked'])}" for cell in cells))
        tables += [Table(one.label, headings, rows)] if rows else []
    return tables


def _shaded(kept: int | None, weights: int) -> str:
    if kept is None:
        return MISSING
    share = 1 - kept / weights
    return Markup('<i style="--share: {:.0f}%">{}</i>').format(60 * share**4, SPARSITY.text(share))


def _predictions(series: Sequence[Series]) -> list[Plot]:
    lines = []
    for one in series:
        steps = [step for cell in one.cells for step in cell.get("steps") or []]
        predicted, before, after = columns(steps, "predicted_increase", "loss_before", "loss_after")
        grown = (predicted > 0) & (after > before)
        lines.append(Line(one, predicted[grown], (after - before)[grown]))
    note = "One point per step; above the dotted line the loss grew by more than the quadratic model predicts."
    note += " Steps whose loss fell, or was predicted to fall, are left out."
    return curve_plot("steps-predicted", "Increase of the loss", PREDICTED, TRUE, lines, note=note, diagonal=True)


def _paths(series: Sequence[Series]) -> list[Plot]:
    lines = []
    for one in series:
        histories = [cell["steps"] for cell in one.cells if len(cell.get("steps") or []) > 1]
        if histories:
            steps = max(histories, key=lambda steps: steps[-1]["sparsity"])
            lines.append(Line(one, *columns(steps, "sparsity", "loss_after")))
    note = "On the way to the highest sparsity of each method."
    return curve_plot("steps-loss", "Loss after each step", SPARSITY, STEP_LOSS, lines, note=note)


def _tuning(series: Sequence[Series]) -> list[Plot]:
    """The training losses between the steps of gradual pruning, cell by cell."""
    alone = []
    for one in series:
        for number, cell in enumerate(cell for cell in one.cells if cell["training"]):
            label = one.label if len(one.cells) == 1 else f"{one.label} at {percent(cell['asked'])}"
            alone.append(replace(one, label=label, repeat=one.repeat + number, cells=[cell]))
    return _trace_plots("tuning-loss", "Training loss", TRAINING_LOSS, alone, "training", "loss")


def _trace_plots(
    ident: str, name: str, quantity: Quantity, series: Sequence[Series], field: str, key: str
) -> list[Plot]:
    """Values by step and by time: the mean over seeds, and over stretches of a long training."""
    by_step, by_time, over = [], [], dict[str, None]()
    for one in series:
        seeds = [columns(cell.get(field) or [], "step", "second", key) for cell in one.cells]
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
    if any(len(line.points) > 1 for line in by_step):
        time = scaled("time", (x for line in by_time for x, _ in line.points), TIMES)
        plots += curve_plot(f"{ident}-second", name, time, quantity, by_time, note=note)
    return plots


def _costs(kind: str, series: Sequence[Series]) -> list[Plot]:
    plots = []
    for name, key, units in (("time", "time", TIMES), ("peak memory", "peak_bytes", SIZES)):
        values = [(one, [cell[key] for cell in one.cells if cell.get(key) is not None]) for one in series]
        bars = [(one.label, one.colour, found) for one, found in values if found]
        several = "Mean and range over the " + ("sparsities." if kind == "prune" else "seeds.")
        note = several if any(len(found) > 1 for _, _, found in bars) else ""
        quantity = scaled(name, (value for _, _, found in bars for value in found), units)
        plots += bar_plot(f"{kind}-{key.split('_')[0]}", capital(name), quantity, bars, note)
    return plots


def _cell_table(series: Sequence[Series]) -> list[Table]:
    """One row per cell with links to its files; columns that no cell has are left out."""
    cells = [(one, cell) for one in series for cell in one.cells]
    time = scaled("time", (cell["time"] for _, cell in cells), TIMES)
    known = {
        "asked": Quantity("asked for", "%", 100, 1),
        "sparsity": SPARSITY,
        "seed": Quantity("seed", decimals=0),
        "step_count": Quantity("steps", decimals=0),
        "last_loss": Quantity("last training loss"),
        "loss": LOSS,
        **{f"measure {group[0].run['measure']}": quantity for quantity, group in by_measure(series).items()},
        "time": time,
        "gradient_seconds": replace(time, name="gradients"),
        "peak_bytes": scaled("peak memory", (cell.get("peak_bytes") for _, cell in cells), SIZES),
        "compact": scaled("compact file", (cell["compact"] for _, cell in cells), SIZES),
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
    """What each file holds, linked to it if the page knows the folder of the run."""
    folder, link = one.run["folder"], Markup('<a href="{}">{}</a>')
    files = [(name, quote(path)) for name, path in (cell.get("files") or {}).items()]
    return Markup(", ").join(name if folder is None else link.format(folder + path, name) for name, path in files)

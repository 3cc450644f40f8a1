"""What the page says of pruning: quality by sparsity, layers, steps, and the training between steps."""

from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from mfac.app.report.costs import cell_section, cost_section
from mfac.app.report.figures import Line, array, curve_plot
from mfac.app.report.parts import Plot, Section, Table
from mfac.app.report.quantities import LOSS, MISSING, SPARSITY, Quantity, capital, measure_quantity, percent
from mfac.app.report.record import Record, Series, asked_of, by_measure, series_of
from mfac.app.report.training import trace_plots

PREDICTED, TRUE = Quantity("predicted increase of the loss"), Quantity("true increase of the loss")


def prune_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the pruning runs."""
    series = series_of(runs, "prune")
    plots = []
    for number, (name, group) in enumerate(by_measure(series).items()):
        quantity = measure_quantity(name, [cell.get("measure") for one in group for cell in one.cells])
        plots += _by_sparsity(f"prune-measure-{number}", quantity, "measure", group)
    plots += _by_sparsity("prune-loss", LOSS, "loss", series)
    shading = "Per cent of the weights that were removed; the darker, the more."
    return [
        Section("quality", "What pruning costs", plots, text="" if plots else "No cell has a finite value."),
        Section("layers", "Sparsity by layer", tables=_layer_tables(series), text=shading),
        Section("steps", "Step by step", _step_plots(series)),
        Section("tuning", "Training between the steps", _tuning_plots(series)),
        cost_section("prune", series),
        cell_section("prune", series),
    ]


def _by_sparsity(ident: str, quantity: Quantity, key: str, series: Sequence[Series]) -> list[Plot]:
    lines, dense = [], dict[float, dict[str, None]]()
    for one in series:
        cells = [cell for cell in one.cells if cell.get("sparsity") is not None]
        cells.sort(key=lambda cell: cell["sparsity"])
        lines.append(Line(one, array(cell["sparsity"] for cell in cells), array(cell.get(key) for cell in cells)))
        level = (one.run.get("dense") or {}).get(key)
        if level is not None:
            dense.setdefault(level, {})[one.run["title"]] = None
    levels = {f"dense · {', '.join(titles)}" if len(dense) > 1 else "dense": level for level, titles in dense.items()}
    return curve_plot(ident, capital(quantity.name), SPARSITY, quantity, lines, levels=levels)


def _layer_tables(series: Sequence[Series]) -> list[Table]:
    tables = []
    for one in series:
        cells = [cell for cell in one.cells if cell.get("layers")]
        weights = {layer["name"]: layer["weights"] for cell in cells for layer in cell["layers"] if layer["weights"]}
        kept = [{layer["name"]: layer.get("kept") for layer in cell["layers"]} for cell in cells]
        rows = [
            [name, f"{count:,}", *(_shaded(found.get(name), count) for found in kept)]
            for name, count in weights.items()
        ]
        headings = ("layer", "weights", *(f"at {percent(asked_of(cell))}" for cell in cells))
        tables += [Table(one.label, headings, rows)] if rows else []
    return tables


def _shaded(kept: int | None, weights: int) -> str:
    if kept is None:
        return MISSING
    share = 1 - kept / weights
    return Markup('<i style="--share: {:.0f}%">{}</i>').format(60 * share**4, SPARSITY.text(share))


def _step_plots(series: Sequence[Series]) -> list[Plot]:
    predictions, paths = [], []
    for one in series:
        histories = [
            [step for step in cell.get("steps") or [] if step.get("sparsity") is not None] for cell in one.cells
        ]
        steps = [step for history in histories for step in history]
        predicted, before, after = (
            array(step.get(key) for step in steps) for key in ("predicted_increase", "loss_before", "loss_after")
        )
        if ((predicted > 0) & (after > before)).any():
            predictions.append(Line(one, predicted, after - before))
        longest = max(histories, key=lambda history: history[-1]["sparsity"] if len(history) > 1 else -1)
        if len(longest) > 1:
            columns = (array(step.get(key) for step in longest) for key in ("sparsity", "loss_after"))
            paths.append(Line(one, *columns))
    note = "One point per step; above the dotted line the loss grew by more than the quadratic model predicts."
    if any((line.x <= 0).any() or (line.y <= 0).any() for line in predictions):
        note += " Steps whose loss fell, or was predicted to, are only in the table."
    title = "Predicted and true increase of the loss"
    return [
        *curve_plot("steps-predicted", title, PREDICTED, TRUE, predictions, note=note, scatter=True),
        *curve_plot(
            "steps-loss", "Loss after each step", SPARSITY, Quantity("loss on a few training batches"), paths,
            note="On the way to the highest sparsity of each method.",
        ),
    ]  # fmt: skip


def _tuning_plots(series: Sequence[Series]) -> list[Plot]:
    """The training losses between the steps of gradual pruning."""
    traces = []
    for one in series:
        tuned = [cell for cell in one.cells if cell.get("training")]
        for number, cell in enumerate(tuned):
            label = one.label if len(tuned) == 1 else f"{one.label} at {percent(asked_of(cell))}"
            columns = [array(entry.get(key) for entry in cell["training"]) for key in ("step", "second", "loss")]
            traces.append((replace(one, label=label, repeat=one.repeat + number), [columns]))
    return trace_plots("tuning-loss", "Training loss", Quantity("training loss"), traces, smooth=True)

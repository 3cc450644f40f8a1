"""The sections of pruning runs: what is kept at which sparsity, what the methods foresaw, and at what cost."""

from collections.abc import Sequence

from mfac.app.report.cells_view import prune_cells
from mfac.app.report.cost_view import cost_section
from mfac.app.report.figures import Figure, Section
from mfac.app.report.layer_view import layer_section
from mfac.app.report.lines import Curve, Level, Plot, line_legend, line_plot
from mfac.app.report.loss_view import Trace, loss_figures
from mfac.app.report.quantities import LOSS, REMOVED, SPARSITY, Quantity, capital, measure_quantity, percent
from mfac.app.report.record import Record, Series, asked_of, measure_name, run_titles, series_of
from mfac.app.report.scales import linear_scale, sparsity_scale, value_scale
from mfac.app.report.steps_view import steps_section
from mfac.app.report.tables import Table


def prune_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the pruning runs, those without anything to show left out."""
    series = series_of(runs, "prune")
    if not series:
        return []
    sections = [_quality_section(runs, series), layer_section(series), steps_section(series)]
    sections += [_tuning_section(series), cost_section("prune", series), prune_cells(series)]
    return [section for section in sections if section is not None]


def _quality_section(runs: Sequence[Record], series: Sequence[Series]) -> Section:
    figures = []
    for number, name in enumerate(dict.fromkeys(measure_name(one.run) for one in series)):
        of_name = [one for one in series if measure_name(one.run) == name]
        values = [cell.get("measure") for one in of_name for cell in one.cells]
        if any(value is not None for value in values):
            quantity = measure_quantity(name, [*values, *(_dense(one.run, "measure") for one in of_name)])
            figures.append(_by_sparsity(f"prune-measure-{number}", quantity, "measure", of_name, runs))
    figures.append(_by_sparsity("prune-loss", LOSS, "loss", series, runs))
    found = [figure for figure in figures if figure]
    return Section("quality", "What pruning costs", found, text="" if found else "No cell has a finite value.")


def _by_sparsity(
    ident: str, quantity: Quantity, key: str, series: Sequence[Series], runs: Sequence[Record]
) -> Figure | None:
    curves = [_curve(one, quantity, key) for one in series]
    values = [y for curve in curves for _, y in curve.points if y is not None]
    if not values:
        return None
    levels = _levels(series, runs, quantity, key)
    scale = value_scale if key == "loss" else linear_scale
    y = scale([*values, *(level.value for level in levels)])
    x = sparsity_scale([x for curve in curves for x, _ in curve.points])
    title = f"{capital(quantity.name)} by sparsity"
    note = "Dotted: the dense model. " if levels else ""
    note += (
        ""
        if x.warp is float
        else "The axis is spaced by the weights that are left, so that high sparsities stand apart."
    )
    plot = Plot(ident, title, x, y, REMOVED.heading, quantity.heading)
    table = _table(title, series, quantity, key)
    return Figure(ident, title, note, line_plot(plot, curves, levels), line_legend(curves, levels), [table])


def _curve(one: Series, quantity: Quantity, key: str) -> Curve:
    cells = sorted((cell for cell in one.cells if cell.get("sparsity") is not None), key=lambda cell: cell["sparsity"])
    points = [(100 * cell["sparsity"], quantity.shown(cell.get(key))) for cell in cells]
    hovers = [f"{one.label} at {SPARSITY.full(cell['sparsity'])}: {quantity.full(cell.get(key))}" for cell in cells]
    return Curve(one.label, one.style, points, hovers)


def _levels(series: Sequence[Series], runs: Sequence[Record], quantity: Quantity, key: str) -> list[Level]:
    """The dense models, one line for all runs that share its value."""
    drawn = {id(one.run) for one in series}
    found: dict[float, list[str]] = {}
    for title, run in zip(run_titles(runs), runs, strict=True):
        value = quantity.shown(_dense(run, key)) if id(run) in drawn else None
        if value is not None:
            found.setdefault(value, []).append(title)
    if len(found) == 1:
        return [Level("dense", value) for value in found]
    return [Level(f"dense · {', '.join(titles)}", value) for value, titles in found.items()]


def _dense(run: Record, key: str) -> float | None:
    return (run.get("dense") or {}).get(key)


def _table(title: str, series: Sequence[Series], quantity: Quantity, key: str) -> Table:
    rows = [
        [one.label, percent(asked_of(cell)), SPARSITY.text(cell.get("sparsity")), quantity.text(cell.get(key))]
        for one in series
        for cell in one.cells
    ]
    dense = dict.fromkeys((one.run.get("title"), _dense(one.run, key)) for one in series)
    rows += [
        [f"dense ({name})" if len(dense) > 1 else "dense", "", "0.00", quantity.text(value)] for name, value in dense
    ]
    return Table(title, ("method", "asked for", SPARSITY.heading, quantity.heading), rows)


def _tuning_section(series: Sequence[Series]) -> Section | None:
    """The losses of the training between the steps of gradual pruning."""
    tuned = [(one, cell) for one in series for cell in one.cells if cell.get("training")]
    alone = len({one.style for one, _ in tuned}) == len(tuned)
    traces = []
    for number, (one, cell) in enumerate(tuned):
        label = one.label if alone else f"{one.label} at {percent(asked_of(cell))}"
        steps, seconds, losses = ([entry.get(key) for entry in cell["training"]] for key in ("step", "second", "loss"))
        traces.append(Trace(label, one.style if alone else number, [(steps, seconds, losses)]))
    if not traces:
        return None
    return Section("tuning", "Training between the steps", loss_figures("tuning", traces))

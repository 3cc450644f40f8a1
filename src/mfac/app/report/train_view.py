"""The sections of training runs: losses, evaluations, time and memory, by optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfac.app.report.cells_view import train_cells
from mfac.app.report.cost_view import cost_section
from mfac.app.report.figures import Figure, Section
from mfac.app.report.lines import Curve, Plot, line_legend, line_plot
from mfac.app.report.loss_view import Trace, loss_figures
from mfac.app.report.quantities import LOSS, STEP, Quantity, capital, measure_quantity, time_quantity
from mfac.app.report.record import Record, Series, measure_name, series_of
from mfac.app.report.scales import linear_scale, tight_scale, value_scale
from mfac.app.report.tables import Table, evenly, thinned

MOST_POINTS, MOST_MARKS = 120, 14


@dataclass(frozen=True)
class Evaluation:
    """One evaluation over the seeds that have it: step, second, and mean, lowest and highest value."""

    step: float
    second: float | None
    mean: float
    low: float
    high: float
    seeds: int


def train_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the training runs, those without anything to show left out."""
    series = series_of(runs, "train")
    if not series:
        return []
    traces = [Trace(one.label, one.style, [_losses(cell) for cell in one.cells]) for one in series]
    sections = [
        _evaluation_section(series),
        Section("training", "Training loss", loss_figures("training", traces)),
        cost_section("train", series),
        train_cells(series),
    ]
    return [section for section in sections if section and (section.figures or section.tables or section.text)]


def _losses(cell: Record) -> tuple[list[float | None], list[float | None], list[float | None]]:
    losses = list(cell.get("losses") or [])
    seconds = list(cell.get("seconds") or [])[: len(losses)]
    seconds += [None] * (len(losses) - len(seconds))
    return [float(step) for step in range(1, len(losses) + 1)], seconds, losses


def _evaluation_section(series: Sequence[Series]) -> Section:
    figures: list[Figure] = []
    for number, name in enumerate(dict.fromkeys(measure_name(one.run) for one in series)):
        of_name = [one for one in series if measure_name(one.run) == name]
        values = [entry.get("measure") for one in of_name for entry in _entries(one)]
        figures += _both(f"eval-measure-{number}", measure_quantity(name, values), "measure", of_name)
    figures += _both("eval-loss", LOSS, "loss", series)
    text = "" if figures else "No evaluations were made."
    return Section("evaluations", "Evaluations", figures, text=text)


def _both(ident: str, quantity: Quantity, key: str, series: Sequence[Series]) -> list[Figure]:
    """One figure by step, one by second."""
    found = [(one, _evaluations(one, key)) for one in series]
    found = [(one, evaluations) for one, evaluations in found if evaluations]
    if not found:
        return []
    time = time_quantity([entry.second for _, evaluations in found for entry in evaluations])
    name = capital(quantity.name) if key == "measure" else "Evaluation loss"
    by_step = _figure(f"{ident}-step", f"{name} by step", quantity, STEP, lambda entry: entry.step, found)
    by_second = _figure(f"{ident}-second", f"{name} by time", quantity, time, lambda entry: entry.second, found)
    return [figure for figure in (by_step, by_second) if figure]


def _figure(
    ident: str,
    title: str,
    quantity: Quantity,
    axis: Quantity,
    x_of: Callable[[Evaluation], float | None],
    found: Sequence[tuple[Series, Sequence[Evaluation]]],
) -> Figure | None:
    curves = [_curve(one, evaluations, quantity, axis, x_of) for one, evaluations in found]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    ys = [y for curve in curves for _, y in curve.points if y is not None]
    ys += [y for curve in curves for _, low, high in curve.band for y in (low, high)]
    scale = value_scale(ys) if quantity is LOSS else linear_scale(ys)
    x = tight_scale([x for curve in curves for x, _ in curve.points])
    plot = Plot(ident, title, x, scale, axis.heading, quantity.heading)
    several = any(entry.seeds > 1 for _, evaluations in found for entry in evaluations)
    note = "Mean over seeds; the band is their range." if several else ""
    table = _table(title, quantity, axis, x_of, found)
    return Figure(ident, title, note, line_plot(plot, curves), line_legend(curves), [table])


def _curve(
    one: Series,
    evaluations: Sequence[Evaluation],
    quantity: Quantity,
    axis: Quantity,
    x_of: Callable[[Evaluation], float | None],
) -> Curve:
    kept = [evaluations[place] for place in evenly(len(evaluations), MOST_POINTS)]
    placed = [(x, entry) for entry in kept if (x := axis.shown(x_of(entry))) is not None]
    points = [(x, quantity.shown(entry.mean)) for x, entry in placed]
    marked = set(evenly(len(placed), MOST_MARKS))
    hovers = [
        f"{one.label}, {axis.name} {axis.full(x_of(entry))}: {quantity.full(entry.mean)}" if place in marked else ""
        for place, (_, entry) in enumerate(placed)
    ]
    band = []
    if any(entry.seeds > 1 for _, entry in placed):
        band = [(x, entry.low * quantity.factor, entry.high * quantity.factor) for x, entry in placed]
    return Curve(one.label, one.style, points, hovers, band=band)


def _table(
    title: str,
    quantity: Quantity,
    axis: Quantity,
    x_of: Callable[[Evaluation], float | None],
    found: Sequence[tuple[Series, Sequence[Evaluation]]],
) -> Table:
    rows = [
        [one.label, axis.text(x_of(entry)), *(quantity.text(value) for value in (entry.mean, entry.low, entry.high))]
        for one, evaluations in found
        for entry in evaluations
    ]
    return thinned(Table(title, ("optimizer", axis.heading, quantity.heading, "lowest", "highest"), rows))


def _entries(one: Series) -> list[Record]:
    return [entry for cell in one.cells for entry in cell.get("evaluations") or []]


def _evaluations(one: Series, key: str) -> list[Evaluation]:
    """The evaluations of a series by step, each over the seeds that have it."""
    by_step: dict[float, list[Record]] = {}
    for entry in _entries(one):
        if entry.get(key) is not None and entry.get("step") is not None:
            by_step.setdefault(entry["step"], []).append(entry)
    return [_over_seeds(step, by_step[step], key) for step in sorted(by_step)]


def _over_seeds(step: float, entries: Sequence[Record], key: str) -> Evaluation:
    values = [float(entry[key]) for entry in entries]
    seconds = [float(entry["second"]) for entry in entries if entry.get("second") is not None]
    second = sum(seconds) / len(seconds) if seconds else None
    return Evaluation(step, second, sum(values) / len(values), min(values), max(values), len(values))

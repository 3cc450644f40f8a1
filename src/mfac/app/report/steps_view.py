"""Pruning step by step: what the quadratic model foresaw against what came, and the loss on the way."""

from collections.abc import Callable, Sequence

from mfac.app.report.figures import Figure, Section
from mfac.app.report.lines import Curve, Plot, line_legend, line_plot, scatter_legend, scatter_plot
from mfac.app.report.quantities import LOSS, MISSING, REMOVED, SPARSITY, percent, significant
from mfac.app.report.record import Record, Series, asked_of
from mfac.app.report.scales import log_scale, sparsity_scale, value_scale
from mfac.app.report.tables import Table, evenly, thinned

DIAGONAL = "predicted = true"
MOST_POINTS, MOST_ROWS = 1200, 400
Pair = tuple[float, float]


def steps_section(series: Sequence[Series]) -> Section | None:
    """Both figures, as far as there is something to plot; None where there are no steps."""
    figures = [figure for figure in (_predictions(series), _path(series)) if figure]
    return Section("steps", "Step by step", figures) if figures else None


def _predictions(series: Sequence[Series]) -> Figure | None:
    """Every step of every method that predicts, on logarithmic axes."""
    known = {one.label: _pairs(one) for one in series}
    positive = {label: [pair for pair in pairs if min(pair) > 0] for label, pairs in known.items()}
    most = max(20, MOST_POINTS // len(series))
    curves = [_points(one, positive[one.label], most) for one in series if positive[one.label]]
    if not curves:
        return None
    left_out = sum(map(len, known.values())) - sum(map(len, positive.values()))
    note = "One point a step. Above the dotted line the loss grew by more than the quadratic model says."
    if left_out:
        note += f" Steps with a value that is not positive ({left_out:,}) are in the table only."
    xs = [x for curve in curves for x, _ in curve.points]
    # The y axis has the x axis's range too, so that the line of equality goes all the way.
    y = log_scale([*xs, *(y for curve in curves for _, y in curve.points if y is not None)], most=6)
    x = log_scale(xs, most=6)
    title = "Predicted and true increase of the loss"
    plot = Plot("steps-predicted", title, x, y, "predicted increase of the loss", "true increase of the loss")
    headings = ("predicted increase", "true increase")
    table = _table("Increase of the loss", series, headings, lambda step: (step.get("predicted_increase"), _true(step)))
    return Figure(plot.ident, title, note, scatter_plot(plot, curves), scatter_legend(curves, DIAGONAL), [table])


def _points(one: Series, pairs: Sequence[Pair], most: int) -> Curve:
    kept = [pairs[place] for place in evenly(len(pairs), most)]
    hovers = [f"{one.label}: predicted {significant(p, 3)}, true {significant(t, 3)}" for p, t in kept]
    return Curve(one.label, one.style, kept, hovers)


def _path(series: Sequence[Series]) -> Figure | None:
    """The loss after each step on the way to the highest sparsity of each series."""
    curves = [curve for one in series if (curve := _path_curve(one))]
    ys = [y for curve in curves for _, y in curve.points if y is not None]
    if not ys:
        return None
    x = sparsity_scale([x for curve in curves for x, _ in curve.points])
    title = "Loss after each step"
    plot = Plot("steps-loss", title, x, value_scale(ys), REMOVED.heading, "loss on a few training batches")
    note = "On the way to the highest sparsity of each method."
    headings = ("loss before", "loss after")
    table = _table(title, series, headings, lambda step: (step.get("loss_before"), step.get("loss_after")))
    return Figure(plot.ident, title, note, line_plot(plot, curves), line_legend(curves), [table])


def _path_curve(one: Series) -> Curve | None:
    stepped = [cell for cell in one.cells if len(_steps(cell)) > 1]
    if not stepped:
        return None
    steps = _steps(max(stepped, key=asked_of))
    kept = [steps[place] for place in evenly(len(steps), 60)]
    points = [(100 * step["sparsity"], LOSS.shown(step.get("loss_after"))) for step in kept]
    hovers = [f"{one.label} at {SPARSITY.full(step['sparsity'])}: {LOSS.text(step.get('loss_after'))}" for step in kept]
    return Curve(one.label, one.style, points, hovers)


def _steps(cell: Record) -> list[Record]:
    return [step for step in cell.get("steps") or [] if step.get("sparsity") is not None]


def _pairs(one: Series) -> list[Pair]:
    steps = [(LOSS.shown(step.get("predicted_increase")), _true(step)) for cell in one.cells for step in _steps(cell)]
    return [(predicted, true) for predicted, true in steps if predicted is not None and true is not None]


def _true(step: Record) -> float | None:
    before, after = LOSS.shown(step.get("loss_before")), LOSS.shown(step.get("loss_after"))
    return None if before is None or after is None else after - before


def _table(
    caption: str,
    series: Sequence[Series],
    headings: tuple[str, str],
    figures: Callable[[Record], tuple[float | None, float | None]],
) -> Table:
    rows = []
    for one in series:
        for cell in one.cells:
            for number, step in enumerate(_steps(cell), 1):
                texts = [MISSING if value is None else significant(value) for value in figures(step)]
                name = f"{one.label} at {percent(asked_of(cell))}"
                rows.append([name, str(number), SPARSITY.text(step.get("sparsity")), *texts])
    return thinned(Table(caption, ("method", "step", SPARSITY.heading, *headings), rows), MOST_ROWS)

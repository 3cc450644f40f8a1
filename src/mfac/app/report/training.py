"""What the page says of training: evaluations and losses, by step and by time."""

from collections.abc import Sequence

import numpy as np

from mfac.app.report.costs import cell_section, cost_section
from mfac.app.report.figures import Array, Line, array, curve_plot
from mfac.app.report.parts import Plot, Section
from mfac.app.report.quantities import LOSS, STEP, TIMES, Quantity, capital, measure_quantity, scaled
from mfac.app.report.record import Record, Series, by_measure, series_of

Trace = tuple[Series, Sequence[Sequence[Array]]]  # of each seed its steps, its seconds and its values


def train_sections(runs: Sequence[Record]) -> list[Section]:
    """All sections of the training runs."""
    series = series_of(runs, "train")
    plots = []
    for number, (name, group) in enumerate(by_measure(series).items()):
        traces = [(one, [_evaluations(cell, "measure") for cell in one.cells]) for one in group]
        quantity = measure_quantity(name, [float(value) for _, seeds in traces for seed in seeds for value in seed[2]])
        plots += trace_plots(f"eval-measure-{number}", capital(name), quantity, traces)
    traces = [(one, [_evaluations(cell, "loss") for cell in one.cells]) for one in series]
    plots += trace_plots("eval-loss", "Evaluation loss", LOSS, traces)
    traces = [(one, [_losses(cell) for cell in one.cells]) for one in series]
    losses = trace_plots("training-loss", "Training loss", Quantity("training loss"), traces, smooth=True)
    return [
        Section("evaluations", "Evaluations", plots, text="" if plots else "No evaluations were made."),
        Section("training", "Training loss", losses),
        cost_section("train", series),
        cell_section("train", series),
    ]


def trace_plots(ident: str, name: str, quantity: Quantity, traces: Sequence[Trace], smooth: bool = False) -> list[Plot]:
    """The mean of the seeds with their range, by step and by time."""
    by_step = [_over_seeds(one, seeds, smooth) for one, seeds in traces]
    by_time = [Line(line.series, seconds, line.y, line.low, line.high, line.raw) for line, seconds in by_step]
    lines = [line for line, _ in by_step]
    note = "Smoothed, with the losses as they are thin behind. " if any(line.raw is not None for line in lines) else ""
    note += "Mean over seeds; the band is their range." if any(line.low is not None for line in lines) else ""
    plots = curve_plot(f"{ident}-step", name, STEP, quantity, lines, note=note)
    if any(line.there.sum() > 1 for line in lines):
        time = scaled("time", [float(seconds[-1]) for _, seconds in by_step if len(seconds)], TIMES)
        plots += curve_plot(f"{ident}-second", name, time, quantity, by_time, note=note)
    return plots


def _over_seeds(one: Series, seeds: Sequence[Sequence[Array]], smooth: bool) -> tuple[Line, Array]:
    """The line by step, and the seconds of its steps."""
    steps = np.unique(np.concatenate([steps for steps, _, _ in seeds]))
    table = np.full((3, len(seeds), len(steps)), np.nan)
    window = 2 * (min(len(steps) // 40, 500) // 2) + 1 if smooth else 1
    for row, (at, seconds, values) in enumerate(seeds):
        table[:, row, np.searchsorted(steps, at)] = seconds, values, smoothed(values, window)
    known = np.ma.masked_invalid(table)
    seconds, raw, mean = known.mean(axis=1).filled(np.nan)
    low, high = (
        (known[2].min(axis=0).filled(np.nan), known[2].max(axis=0).filled(np.nan)) if len(seeds) > 1 else (None,) * 2
    )
    return Line(one, steps, mean, low, high, raw if window > 1 else None), seconds


def smoothed(values: Array, window: int) -> Array:
    """The mean of the `window` values around each place, fewer at the ends; NaN values are left out."""
    if window == 1:
        return values
    there = np.isfinite(values)
    sums, counts = (np.convolve(one, np.ones(window), "same") for one in (np.where(there, values, 0.0), there))
    return np.where(counts > 0.5, sums / np.maximum(counts, 1), np.nan)


def _evaluations(cell: Record, key: str) -> list[Array]:
    entries = [entry for entry in cell.get("evaluations") or [] if entry.get("step") is not None]
    return [array(entry.get(name) for entry in entries) for name in ("step", "second", key)]


def _losses(cell: Record) -> list[Array]:
    losses = array(cell.get("losses") or [])
    seconds = np.full_like(losses, np.nan)
    measured = array(cell.get("seconds") or [])[: len(losses)]
    seconds[: len(measured)] = measured
    return [np.arange(1.0, len(losses) + 1), seconds, losses]

"""What a run comes to: a sentence, and a small table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mfac.app.report.quantities import LOSS, Quantity, capital, measure_quantity, percent
from mfac.app.report.record import Record, Series, asked_of, higher_is_better, measure_name, series_of
from mfac.app.report.tables import Table

NAMED = 4
USUAL = 0.9  # the sparsity of the sentence, where it was asked for


@dataclass(frozen=True)
class Summary:
    """A sentence and a table for the runs that share a kind and a measure."""

    sentence: str
    table: Table | None


def summaries(runs: Sequence[Record]) -> list[Summary]:
    """One for the pruning and one for the training of each measure."""
    found = []
    for kind, summarize in (("prune", _prune), ("train", _train)):
        series = series_of(runs, kind)
        for name in dict.fromkeys(measure_name(one.run) for one in series):
            found.append(summarize([one for one in series if measure_name(one.run) == name]))
    return found or [Summary("No cell is complete yet.", None)]


def _prune(series: Sequence[Series]) -> Summary:
    quantity, key, higher = _yardstick(series, [cell for one in series for cell in one.cells])
    asked = sorted({asked_of(cell) for one in series for cell in one.cells})
    values = {one.label: {asked_of(cell): cell.get(key) for cell in one.cells} for one in series}
    counts = Counter(at for found in values.values() for at, value in found.items() if value is not None)
    dense = {(one.run.get("dense") or {}).get(key) for one in series} - {None}
    table = _prune_table(quantity, values, asked, dense, higher)
    if not counts:
        return Summary("No cell has a finite value.", table)
    at = max(counts, key=lambda asked: (counts[asked], -abs(asked - USUAL)))
    ranked = _ranked({label: found[at] for label, found in values.items() if found.get(at) is not None}, higher)
    verb = "keeps" if higher else "has"
    after = f"; dense {quantity.full(dense.pop())}" if len(dense) == 1 else ""
    return Summary(f"At {percent(at)} sparsity {_listed(ranked, quantity, verb)}{after}.", table)


def _prune_table(
    quantity: Quantity,
    values: dict[str, dict[float, float | None]],
    asked: Sequence[float],
    dense: set[float | None],
    higher: bool,
) -> Table:
    rows = [
        [label, *(quantity.text(found[at]) if at in found else "" for at in asked)] for label, found in values.items()
    ]
    best = set()
    for column, at in enumerate(asked, 1):
        known = {row: found[at] for row, found in enumerate(values.values()) if found.get(at) is not None}
        target = (max if higher else min)(known.values(), default=None)  # type: ignore[type-var]
        best |= {(row, column) for row, value in known.items() if value == target and len(known) > 1}
    headings = ("method", *(percent(at) for at in asked))
    note = "The best of each column in bold." if best else ""
    caption = f"{capital(quantity.heading)} by sparsity"
    caption += f"; the dense model has {quantity.text(next(iter(dense)))}" if len(dense) == 1 else ""
    return Table(caption, headings, rows, 1, note, frozenset(best))


def _train(series: Sequence[Series]) -> Summary:
    lasts = {one.label: [_last(cell) for cell in one.cells] for one in series}
    quantity, key, higher = _yardstick(series, [entry for found in lasts.values() for entry in found])
    means = {label: _mean([entry.get(key) for entry in found]) for label, found in lasts.items()}
    ranked = _ranked({label: mean for label, mean in means.items() if mean is not None}, higher)
    rows = []
    for one in series:
        known = [value for entry in lasts[one.label] if (value := entry.get(key)) is not None]
        spread = [min(known), max(known)] if known else [None, None]
        steps = max((cell.get("steps") or len(cell.get("losses") or []) for cell in one.cells), default=0)
        figures = [quantity.text(value) for value in (means[one.label], *spread)]
        rows.append([one.label, str(len(one.cells)), f"{steps:,}", *figures])
    headings = ("optimizer", "seeds", "steps", quantity.heading, "lowest", "highest")
    best = frozenset((row, 3) for row, one in enumerate(series) if len(ranked) > 1 and one.label == ranked[0][0])
    table = Table(f"{capital(quantity.heading)} at the end", headings, rows, 1, "", best)
    if not ranked:
        return Summary("No training has a finite value at its end.", table)
    seeds = max(len(one.cells) for one in series)
    over = f" (mean over {seeds} seeds)" if seeds > 1 else ""
    return Summary(f"At the end of training {_listed(ranked, quantity, 'reaches')}{over}.", table)


def _yardstick(series: Sequence[Series], entries: Sequence[Record]) -> tuple[Quantity, str, bool]:
    """The measure where there is one, the loss where not: its quantity, its key, and whether more of it is better."""
    measures = [entry.get("measure") for entry in entries]
    if any(value is not None for value in measures):
        return measure_quantity(measure_name(series[0].run), measures), "measure", higher_is_better(series[0].run)
    return LOSS, "loss", False


def _last(cell: Record) -> Record:
    """The last evaluation; where none was made, the last finite training loss."""
    if cell.get("evaluations"):
        return dict(cell["evaluations"][-1])
    return {"loss": next((loss for loss in reversed(cell.get("losses") or []) if loss is not None), None)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ranked(values: dict[str, float | None], higher: bool) -> list[tuple[str, float]]:
    known = [(label, value) for label, value in values.items() if value is not None]
    return sorted(known, key=lambda pair: -pair[1] if higher else pair[1])


def _listed(ranked: Sequence[tuple[str, float]], quantity: Quantity, verb: str) -> str:
    """mfac keeps 95.1 % accuracy, magnitude 82.0 %, and 3 others no better than 80.2 %."""
    (first, value), *others = ranked
    parts = [f"{first} {verb} {'a ' if quantity.name == 'loss' else ''}{_noun(quantity, value)}"]
    parts += [f"{label} {quantity.full(value)}" for label, value in others[: NAMED - 1]]
    left = others[NAMED - 1 :]
    text = ", ".join(parts)
    return f"{text}, and {len(left)} more down to {quantity.full(left[-1][1])} ({left[-1][0]})" if left else text


def _noun(quantity: Quantity, value: float) -> str:
    if quantity.unit == "%":
        return f"{quantity.full(value)} {quantity.name}"
    return f"{quantity.name} of {quantity.full(value)}"

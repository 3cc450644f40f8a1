"""Sparsity by layer: a small picture for each method, with the same shades in all of them."""

from collections.abc import Sequence

from mfac.app.report.figures import Figure, Section
from mfac.app.report.quantities import SPARSITY, percent
from mfac.app.report.record import Record, Series, asked_of
from mfac.app.report.strips import Heat, Row, names_fit, strip
from mfac.app.report.tables import Table, thinned

MOST_PICTURES = 24


def layer_section(series: Sequence[Series]) -> Section | None:
    """One figure a series that has layers; None where none has."""
    drawn = [one for one in series if any(cell.get("layers") for cell in one.cells)]
    if not drawn:
        return None
    values = [value for one in drawn for cell in one.cells for value in _by_name(cell).values()]
    heat = Heat.of(values)
    figures = [_figure(number, one, heat) for number, one in enumerate(drawn[:MOST_PICTURES])]
    text = "How much of each layer is removed, in per cent; the stronger the colour, the more."
    if len(drawn) > MOST_PICTURES:
        text += f" The first {MOST_PICTURES} of {len(drawn)} methods; run.json has the others."
    return Section("layers", "Sparsity by layer", figures, text=text)


def _figure(number: int, one: Series, heat: Heat) -> Figure:
    cells = [cell for cell in one.cells if cell.get("layers")]
    layers = list(dict.fromkeys(name for cell in cells for name in _by_name(cell)))
    rows = [Row(percent(asked_of(cell))[:-2], [_by_name(cell).get(name) for name in layers]) for cell in cells]
    ident = f"layers-{number}"
    drawing = strip(ident, f"Sparsity by layer, {one.label}", rows, layers, heat)
    return Figure(ident, one.label, "", drawing, heat.key, [_table(one.label, cells, layers)])


def _table(label: str, cells: Sequence[Record], layers: Sequence[str]) -> Table:
    weights = {layer["name"]: layer["weights"] for cell in cells for layer in cell["layers"]}
    numbered = not names_fit(layers)
    rows = []
    for number, name in enumerate(layers, 1):
        shares = [_by_name(cell).get(name) for cell in cells]
        texts = [SPARSITY.text(None if share is None else share / 100) for share in shares]
        rows.append([f"{number}  {name}" if numbered else name, f"{weights[name]:,}", *texts])
    headings = ("layer", "weights", *(f"at {percent(asked_of(cell))}" for cell in cells))
    return thinned(Table(f"{label}: sparsity by layer (%)", headings, rows), 400)


def _by_name(cell: Record) -> dict[str, float]:
    """Per cent removed of each layer; layers without weights have no place."""
    return {
        str(layer["name"]): 100 * (1 - layer["kept"] / layer["weights"])
        for layer in cell.get("layers") or []
        if layer.get("weights") and layer.get("kept") is not None
    }

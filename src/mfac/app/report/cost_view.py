"""Time, memory and the size of files, as bars: one a series, its mean over sparsities or seeds, with the range."""

from collections.abc import Sequence

from mfac.app.report.bars import Bar, bar_plot
from mfac.app.report.figures import Figure, Section
from mfac.app.report.marks import box_swatch, legend
from mfac.app.report.quantities import Quantity, percent, significant, size_quantity, time_quantity
from mfac.app.report.record import Record, Series, asked_of
from mfac.app.report.tables import Table

OVER = {"prune": "sparsities", "train": "seeds"}
SECONDS = {"prune": "seconds", "train": "seconds_total"}


def cost_section(kind: str, series: Sequence[Series]) -> Section | None:
    """Time and memory of all series, and for pruning the size of the files; None where nothing was measured."""
    figures = [_time(kind, series), _memory(kind, series), _files(series) if kind == "prune" else None]
    found = [figure for figure in figures if figure]
    title = "Time, memory and files" if kind == "prune" else "Time and memory"
    return Section(f"{kind}-cost", title, found) if found else None


def _time(kind: str, series: Sequence[Series]) -> Figure | None:
    key = SECONDS[kind]
    quantity = time_quantity([cell.get(key) for one in series for cell in one.cells])
    bars = [bar for one in series if (bar := _bar(one, quantity, key, "gradient_seconds"))]
    if not bars:
        return None
    split = any(bar.part is not None for bar in bars)
    parts = [("gradients", box_swatch("cd full")), ("the rest", box_swatch("cd pale"))] if split else []
    title = "Time of a pruning" if kind == "prune" else "Time of a training"
    return _figure(f"{kind}-time", title, quantity, bars, kind, legend(parts))


def _memory(kind: str, series: Sequence[Series]) -> Figure | None:
    quantity = size_quantity([cell.get("peak_bytes") for one in series for cell in one.cells], "peak memory")
    bars = [bar for one in series if (bar := _bar(one, quantity, "peak_bytes"))]
    return _figure(f"{kind}-memory", "Peak memory", quantity, bars, kind) if bars else None


def _figure(ident: str, title: str, quantity: Quantity, bars: Sequence[Bar], kind: str, key: str = "") -> Figure:
    several = any(bar.low is not None for bar in bars)
    note = f"Mean over {OVER[kind]}; the thin line is the range." if several else ""
    rows = [[bar.label, *(quantity_text(value) for value in (bar.value, bar.low, bar.high))] for bar in bars]
    table = Table(
        title, ("method" if kind == "prune" else "optimizer", f"mean ({quantity.unit})", "lowest", "highest"), rows
    )
    return Figure(ident, title, note, bar_plot(ident, title, quantity.heading, bars), legend([]) + key, [table])


def quantity_text(value: float | None) -> str:
    """A figure of a bar, which is in its unit already."""
    return "–" if value is None else significant(value)


def _bar(one: Series, quantity: Quantity, key: str, part: str = "") -> Bar | None:
    values = [value for cell in one.cells if (value := quantity.shown(cell.get(key))) is not None]
    if not values:
        return None
    parts = [value for cell in one.cells if (value := quantity.shown(cell.get(part))) is not None]
    mean = sum(values) / len(values)
    full = sum(parts) / len(parts) if part and parts else None
    text = f"{significant(mean, 3)} {quantity.unit}"
    low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
    return Bar(one.label, one.style, mean, text, full, low, high)


def _files(series: Sequence[Series]) -> Figure | None:
    """The dense file, and for each sparsity the compact one."""
    sized = [(one, cell) for one in series for cell in one.cells if (cell.get("bytes") or {}).get("compact")]
    if not sized:
        return None
    quantity = size_quantity([size for _, cell in sized for size in cell["bytes"].values()], "size of the file")
    groups = _file_groups(sized)
    bars = []
    for (model, dense), by_sparsity in groups.items():
        name = f" · {model}" if len(groups) > 1 else ""
        if dense:
            bars.append(_file_bar(f"dense{name}", 5, [dense], quantity, None))
        for asked, sizes in by_sparsity.items():
            bars.append(_file_bar(f"{percent(asked)}{name}", 0, sizes, quantity, dense))
    title = "Size of the file, dense and compact"
    return Figure(
        "prune-files",
        title,
        "The compact file has the weights that are left and a bit for each place; mean over methods.",
        bar_plot("prune-files", title, quantity.heading, bars),
        tables=[_file_table(sized, quantity)],
    )


def _file_groups(sized: Sequence[tuple[Series, Record]]) -> dict[tuple[str, float], dict[float, list[float]]]:
    """{(task, dense bytes): {sparsity: compact bytes of the methods}}."""
    groups: dict[tuple[str, float], dict[float, list[float]]] = {}
    for one, cell in sorted(sized, key=lambda pair: asked_of(pair[1])):
        model = str((one.run.get("task") or {}).get("name") or "")
        group = groups.setdefault((model, cell["bytes"].get("dense") or 0), {})
        group.setdefault(asked_of(cell), []).append(cell["bytes"]["compact"])
    return groups


def _file_bar(label: str, style: int, sizes: Sequence[float], quantity: Quantity, dense: float | None) -> Bar:
    mean = sum(sizes) / len(sizes)
    shown = [size * quantity.factor for size in (mean, min(sizes), max(sizes))]
    text = f"{significant(shown[0], 3)} {quantity.unit}"
    text += f", {dense / mean:.1f} times smaller" if dense else ""
    low, high = (shown[1], shown[2]) if max(sizes) > 1.01 * min(sizes) else (None, None)
    return Bar(label, style, shown[0], text, None, low, high)


def _file_table(sized: Sequence[tuple[Series, Record]], quantity: Quantity) -> Table:
    rows = []
    for one, cell in sized:
        size = cell["bytes"]
        ratio = significant(size["dense"] / size["compact"], 3) if size.get("dense") else "–"
        texts = [quantity.text(size.get(key)) for key in ("dense", "compact")]
        rows.append([one.label, percent(asked_of(cell)), *texts, ratio])
    headings = ("method", "asked for", f"dense ({quantity.unit})", f"compact ({quantity.unit})", "times smaller")
    return Table("Size of the files", headings, rows)

"""Time, memory and file sizes as bars, and the table of all cells with links to their files."""

from collections.abc import Callable, Sequence
from urllib.parse import quote

from markupsafe import Markup

from mfac.app.report.figures import Bar, bar_plot
from mfac.app.report.parts import Plot, Section, Table
from mfac.app.report.quantities import (
    LOSS,
    MISSING,
    SIZES,
    SPARSITY,
    TIMES,
    measure_quantity,
    percent,
    scaled,
)  # fmt: skip
from mfac.app.report.record import Record, Series, asked_of, by_measure, last_entry, last_loss, task_of

SECONDS = {"prune": "seconds", "train": "seconds_total"}
Column = tuple[str, Callable[[Series, Record], str]]


def cost_section(kind: str, series: Sequence[Series]) -> Section:
    """Time and memory of every series, and the sizes of pruned files."""
    over = "sparsities" if kind == "prune" else "seeds"
    note = f"Mean over {over}, with the range." if any(len(one.cells) > 1 for one in series) else ""
    bars = _bars(series, SECONDS[kind], "gradient_seconds")
    parts = " Full colour: gradients." if any(bar.part for bar in bars) else ""
    time = scaled("time", (bar.high for bar in bars), TIMES)
    plots = bar_plot(f"{kind}-time", "Time", time, bars, note=note + parts)
    bars = _bars(series, "peak_bytes")
    memory = scaled("peak memory", (bar.high for bar in bars), SIZES)
    plots += bar_plot(f"{kind}-memory", "Peak memory", memory, bars, note=note)
    return Section(
        f"{kind}-cost", "Time, memory and files" if kind == "prune" else "Time and memory", plots + _files(series)
    )


def _bars(series: Sequence[Series], key: str, part: str = "") -> list[Bar]:
    bars = []
    for one in series:
        values, parts = ([cell[name] for cell in one.cells if cell.get(name) is not None] for name in (key, part))
        if values:
            share = sum(parts) / len(parts) if parts else None
            bars.append(Bar(one.label, sum(values) / len(values), min(values), max(values), one.colour, share))
    return bars


def _files(series: Sequence[Series]) -> list[Plot]:
    """The dense file of each model, and at each sparsity the compact file, mean over methods."""
    sizes: dict[tuple[str, int], dict[float, list[int]]] = {}
    for one in series:
        for cell in sorted(one.cells, key=asked_of):
            size = cell.get("bytes") or {}
            if size.get("compact") and size.get("dense"):
                model = sizes.setdefault((str(task_of(one.run).get("name") or ""), size["dense"]), {})
                model.setdefault(asked_of(cell), []).append(size["compact"])
    bars = []
    for (task, dense), by_sparsity in sizes.items():
        name = f" · {task}" if len(sizes) > 1 else ""
        bars.append(Bar(f"dense{name}", dense, dense, dense))
        for asked, found in sorted(by_sparsity.items()):
            mean = sum(found) / len(found)
            text = f", {dense / mean:.1f} times smaller"
            bars.append(Bar(f"{percent(asked)}{name}", mean, min(found), max(found), text=text))
    note = "A compact file has the remaining weights and one bit per position; mean over methods."
    quantity = scaled("file size", (bar.high for bar in bars), SIZES)
    return bar_plot("prune-files", "Size of the dense and compact files", quantity, bars, note=note)


def cell_section(kind: str, series: Sequence[Series]) -> Section:
    """One row for each cell, and the links to its files."""
    cells = [cell for one in series for cell in one.cells]
    time = scaled("time", (cell.get(SECONDS[kind]) for cell in cells), TIMES)
    memory = scaled("peak memory", (cell.get("peak_bytes") for cell in cells), SIZES)
    measures = [_measure_column(name, group) for name, group in by_measure(series).items()]
    columns: list[Column]
    if kind == "prune":
        title = "All cells"
        columns = [
            ("asked for", lambda _, cell: percent(asked_of(cell))),
            (SPARSITY.heading, lambda _, cell: SPARSITY.text(cell.get("sparsity"))),
            (LOSS.heading, lambda _, cell: LOSS.text(cell.get("loss"))),
            *measures,
            (f"gradients ({time.unit})", lambda _, cell: time.text(cell.get("gradient_seconds"))),
            ("times smaller", _times_smaller),
        ]
    else:
        title = "All trainings"
        columns = [
            ("seed", lambda _, cell: str(cell.get("seed", MISSING))),
            ("steps", lambda _, cell: f"{cell.get('steps') or len(cell.get('losses') or []):,}"),
            ("last training loss", lambda _, cell: LOSS.text(last_loss(cell))),
            ("last evaluation loss", lambda _, cell: LOSS.text(last_entry(cell).get("loss"))),
            *measures,
        ]
    columns += [
        (time.heading, lambda _, cell: time.text(cell.get(SECONDS[kind]))),
        (memory.heading, lambda _, cell: memory.text(cell.get("peak_bytes"))),
        ("files", _links),
    ]
    rows = [[one.label, *(text(one, cell) for _, text in columns)] for one in series for cell in one.cells]
    table = Table(title, ("label", *(heading for heading, _ in columns)), rows)
    return Section(f"{kind}-cells", title, tables=[table] if rows else [])


def _measure_column(name: str, group: Sequence[Series]) -> Column:
    values = [last_entry(cell).get("measure") for one in group for cell in one.cells]
    quantity = measure_quantity(name, values)
    return quantity.heading, lambda one, cell: quantity.text(last_entry(cell).get("measure")) if one in group else ""


def _times_smaller(_: Series, cell: Record) -> str:
    size = cell.get("bytes") or {}
    return f"{size['dense'] / size['compact']:#.4g}" if size.get("dense") and size.get("compact") else MISSING


def _links(one: Series, cell: Record) -> str:
    """What each file holds, linked to it where the page knows the run's folder."""
    folder = one.run["folder"]
    link = Markup('<a href="{}">{}</a>')
    files = (cell.get("files") or {}).items()
    return Markup(", ").join(
        name if folder is None else link.format(folder + quote(path), name) for name, path in files
    )

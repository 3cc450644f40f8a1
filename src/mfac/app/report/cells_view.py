"""Every figure of every cell, in one table, and where its files are."""

from collections.abc import Callable, Sequence

from mfac.app.report.figures import Section
from mfac.app.report.quantities import (
    LOSS,
    MISSING,
    SPARSITY,
    Quantity,
    measure_quantity,
    percent,
    significant,
    size_quantity,
    time_quantity,
)  # fmt: skip
from mfac.app.report.record import Record, Series, asked_of, measure_name
from mfac.app.report.tables import Table

Column = tuple[str, Callable[[Record], str]]


def prune_cells(series: Sequence[Series]) -> Section:
    """One row a method and sparsity."""
    cells = [cell for one in series for cell in one.cells]
    time = time_quantity([cell.get("seconds") for cell in cells])
    columns: list[Column] = [
        ("asked for", lambda cell: percent(asked_of(cell))),
        (SPARSITY.heading, lambda cell: SPARSITY.text(cell.get("sparsity"))),
        (LOSS.heading, lambda cell: LOSS.text(cell.get("loss"))),
        _measure_column(series, lambda cell: cell, ""),
        (time.heading, lambda cell: time.text(cell.get("seconds"))),
        (f"gradients ({time.unit})", lambda cell: time.text(cell.get("gradient_seconds"))),
        _memory_column(cells),
        ("times smaller", _times_smaller),
    ]
    return _section("cells", "All cells", "Every method at every sparsity", series, "method", columns)


def train_cells(series: Sequence[Series]) -> Section:
    """One row an optimizer and seed."""
    cells = [cell for one in series for cell in one.cells]
    time = time_quantity([cell.get("seconds_total") for cell in cells])
    columns: list[Column] = [
        ("seed", lambda cell: str(cell.get("seed", MISSING))),
        ("steps", lambda cell: f"{cell.get('steps') or len(cell.get('losses') or []):,}"),
        ("last training loss", lambda cell: LOSS.text(_last_loss(cell))),
        ("last evaluation's loss", lambda cell: LOSS.text(_last_evaluation(cell).get("loss"))),
        _measure_column(series, _last_evaluation, "last "),
        (time.heading, lambda cell: time.text(cell.get("seconds_total"))),
        _memory_column(cells),
    ]
    return _section("train-cells", "All trainings", "Every optimizer with every seed", series, "optimizer", columns)


def _section(
    ident: str, title: str, caption: str, series: Sequence[Series], kind: str, columns: Sequence[Column]
) -> Section:
    rows = [[one.label, *(text(cell) for _, text in columns)] for one in series for cell in one.cells]
    headings: tuple[str, ...] = ("label", *(heading for heading, _ in columns))
    texts = 1
    # The method beside the label only where labels are not the methods' names.
    if any(cell.get(kind) not in (None, cell["label"]) for one in series for cell in one.cells):
        kinds = [str(cell.get(kind) or MISSING) for one in series for cell in one.cells]
        rows = [[label, name, *others] for name, (label, *others) in zip(kinds, rows, strict=True)]
        headings, texts = ("label", kind, *headings[1:]), 2
    tables = [Table(caption, headings, rows, texts), _file_table(series)]
    return Section(ident, title, tables=[table for table in tables if table.rows])


def _measure_column(series: Sequence[Series], entry_of: Callable[[Record], Record], before: str) -> Column:
    """The measure; with its unit in each row where the runs differ in what they measure."""
    by_name: dict[str, list[float | None]] = {}
    names: dict[int, str] = {}
    for one in series:
        name = measure_name(one.run)
        by_name.setdefault(name, []).extend(entry_of(cell).get("measure") for cell in one.cells)
        names |= {id(cell): name for cell in one.cells}
    quantities: dict[str, Quantity] = {name: measure_quantity(name, values) for name, values in by_name.items()}
    if len(quantities) == 1:
        quantity = next(iter(quantities.values()))
        return f"{before}{quantity.heading}", lambda cell: quantity.text(entry_of(cell).get("measure"))
    heading = before + " or ".join(by_name)
    return heading, lambda cell: quantities[names[id(cell)]].full(entry_of(cell).get("measure"))


def _memory_column(cells: Sequence[Record]) -> Column:
    memory = size_quantity([cell.get("peak_bytes") for cell in cells], "peak memory")
    return memory.heading, lambda cell: memory.text(cell.get("peak_bytes"))


def _last_loss(cell: Record) -> float | None:
    return next((loss for loss in reversed(cell.get("losses") or []) if loss is not None), None)


def _last_evaluation(cell: Record) -> Record:
    return dict((cell.get("evaluations") or [{}])[-1])


def _times_smaller(cell: Record) -> str:
    size = cell.get("bytes") or {}
    return significant(size["dense"] / size["compact"], 3) if size.get("dense") and size.get("compact") else MISSING


def _file_table(series: Sequence[Series]) -> Table:
    """Where the files of each cell are, from the run's folder on."""
    rows = []
    for one in series:
        for cell in one.cells:
            which = f"seed {cell['seed']}" if "seed" in cell else percent(asked_of(cell))
            rows += [[one.label, which, str(kind), str(name)] for kind, name in (cell.get("files") or {}).items()]
    return Table("Files, from the folder of the run", ("label", "cell", "holds", "file"), rows, texts=4)

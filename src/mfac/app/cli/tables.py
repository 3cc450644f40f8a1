"""Results as a table: with lines on a terminal, aligned text everywhere else."""

import sys
from collections.abc import Sequence
from typing import Any

import typer

Row = Sequence[str]


def show_run(record: dict[str, Any]) -> None:
    """The table of a run, on stdout."""
    header, rows = pruning_table(record) if record["kind"] == "prune" else training_table(record)
    show(record["title"], header, rows)


def pruning_table(record: dict[str, Any]) -> tuple[Row, list[Row]]:
    """One line for the dense model, one for each cell."""
    header = ("method", "sparsity", "loss", record["task"]["measure"], "seconds", "compact file")
    rows: list[Row] = []
    if "dense" in record:
        rows.append(("dense", "", number(record["dense"]["loss"]), number(record["dense"]["measure"]), "", ""))
    for cell in record["cells"]:
        numbers = (number(cell["loss"]), number(cell["measure"]), f"{cell['seconds']:.1f}")
        rows.append((cell["label"], f"{cell['sparsity']:.4f}", *numbers, f"{cell['bytes']['compact']:,} bytes"))
    return header, rows


def training_table(record: dict[str, Any]) -> tuple[Row, list[Row]]:
    """One line for each cell, with its last evaluation."""
    header = ("optimizer", "seed", "steps", "training loss", "loss", record["task"]["measure"], "seconds")
    rows: list[Row] = []
    for cell in record["cells"]:
        last = cell["evaluations"][-1] if cell["evaluations"] else {"loss": None, "measure": None}
        losses = (number(cell["losses"][-1]), number(last["loss"]), number(last["measure"]))
        rows.append((cell["label"], str(cell["seed"]), str(cell["steps"]), *losses, f"{cell['seconds_total']:.1f}"))
    return header, rows


def number(value: float | None) -> str:
    """Four digits, or a dash where there is no number."""
    return "-" if value is None else f"{value:.4g}"


def show(title: str, header: Row, rows: Sequence[Row]) -> None:
    """Prints a table; the first column to the left, the others to the right."""
    if not sys.stdout.isatty():
        typer.echo(aligned([header, *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def aligned(rows: Sequence[Row]) -> str:
    """Columns under one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

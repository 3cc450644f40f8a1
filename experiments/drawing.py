"""Pictures that can be read without colour: every line has its own marker and dash pattern."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

MARKS = "os^Dv*PXd<>"
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), "-", "--", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "++", "**", "--", "||")
Curve = tuple[list[float], list[float]]


def curve(points: Iterable[tuple[float, float]]) -> Curve:
    points = list(points)
    return [x for x, _ in points], [y for _, y in points]


def panels(rows: int = 1, columns: int = 1, size: tuple[float, float] = (8, 4.8), **options: Any) -> tuple[Any, Any]:
    """(figure, array of axes with a grid)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def style(number: int) -> dict[str, Any]:
    """Marker, dash pattern and colour of line `number`."""
    return {"marker": MARKS[number % len(MARKS)], "linestyle": DASHES[number % len(DASHES)], "color": f"C{number % 10}",
            "markersize": 5}  # fmt: skip


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def lines(path: Path, curves: dict[str, Curve], *, x: str, y: str, title: str, **properties: Any) -> Path:
    """{label: (xs, ys)}; `properties` are of the axes (yscale="log")."""
    figure, ((axis,),) = panels()
    for number, (label, (xs, ys)) in enumerate(curves.items()):
        axis.plot(xs, ys, label=label, **style(number))
    axis.set(xlabel=x, ylabel=y, title=title, **properties)
    axis.legend(fontsize=8)
    return save(figure, path)


def bars(path: Path, groups: dict[str, dict[str, float]], *, y: str, title: str, **properties: Any) -> Path:
    """{group: {label: height}} side by side, each bar with its number; `properties` are of the axes (yscale="log")."""
    figure, ((axis,),) = panels(size=(max(8, 1.6 * len(groups)), 4.8))
    axis.grid(False)
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.8 / max(1, len(labels))
    for number, label in enumerate(labels):
        found = [(i, group[label]) for i, group in enumerate(groups.values()) if label in group]
        places = [i + (number - (len(labels) - 1) / 2) * width for i, _ in found]
        drawn = axis.bar(places, [height for _, height in found], width, label=label, hatch=HATCHES[number % 10],
                         color=f"C{number % 10}", edgecolor="black", linewidth=0.5)  # fmt: skip
        axis.bar_label(drawn, fmt="%.3g", fontsize=7)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axis.margins(y=0.2)  # room for the legend above the bars
    axis.set(ylabel=y, title=title, **properties)
    axis.legend(fontsize=8, ncols=4, loc="upper center")
    return save(figure, path)

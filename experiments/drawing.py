"""Pictures that can be read without colour: every line has a mark and a dash of its own."""

from pathlib import Path
from typing import Any

MARKS = "os^Dv*PXd<>"
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), "-", "--", "-.")


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def style(number: int) -> dict[str, Any]:
    """The look of line `number`."""
    return {"marker": MARKS[number % len(MARKS)], "linestyle": DASHES[number % len(DASHES)], "color": f"C{number % 10}"}


def save(figure: Any, path: Path) -> Path:
    """Writes the picture and forgets it."""
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    return path


def lines(
    path: Path,
    curves: dict[str, tuple[list[float], list[float]]],
    *,
    x: str,
    y: str,
    title: str,
    markers: bool = True,
    **axes: Any,
) -> Path:
    """{label: (xs, ys)} in one picture; `axes` are further properties of the axes (xscale="log", ...)."""
    figure, axis = pyplot().subplots(figsize=(8, 4.8), layout="constrained")
    for number, (label, (xs, ys)) in enumerate(curves.items()):
        look = style(number)
        every = 1 if markers else max(1, len(xs) // 8)
        axis.plot(xs, ys, label=label, markevery=every, markersize=5, **look)
    axis.set(xlabel=x, ylabel=y, title=title, **axes)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return save(figure, path)


def bars(path: Path, groups: dict[str, dict[str, float]], *, y: str, title: str, **axes: Any) -> Path:
    """{group: {label: height}} side by side, each bar with its number and a hatching of its own."""
    figure, axis = pyplot().subplots(figsize=(max(8, 1.6 * len(groups)), 4.8), layout="constrained")
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.8 / max(1, len(labels))
    hatches = ("", "//", "..", "xx", "\\\\", "oo", "++", "**", "--", "||")
    for number, label in enumerate(labels):
        found = [(i, group[label]) for i, group in enumerate(groups.values()) if label in group]
        places = [i + (number - (len(labels) - 1) / 2) * width for i, _ in found]
        drawn = axis.bar(places, [height for _, height in found], width, label=label, hatch=hatches[number % 10],
                         color=f"C{number % 10}", edgecolor="black", linewidth=0.5)  # fmt: skip
        axis.bar_label(drawn, fmt="%.3g", fontsize=7)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axis.set(ylabel=y, title=title, **axes)
    axis.margins(y=0.2)  # room for the legend above the bars
    axis.legend(fontsize=8, ncols=4, loc="upper center")
    return save(figure, path)

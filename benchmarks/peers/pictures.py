"""The cells as pictures: time and memory against size with the machine's limits, errors, optimizers, pruning."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from peers import inverses, machine, steps, training
from peers.tables import chosen, limits_of, time_of

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a script, the folder of experiments is not on the path
from experiments import drawing

NAMES = {"d": "weights d", "m": "gradients m"}
THEIRS = "#888888"
STYLES = {  # colour, marker
    "mfac": ("#0b6e4f", "o"),
    "mfac, float32": ("#4cc38a", "v"),
    "mfac, int8": ("#4cc38a", "v"),
    "mfac, top-k 1 %": ("#a3d977", "^"),
    "Algorithm 3": ("#d1495b", "s"),
    "Algorithms 1 and 2": ("#d1495b", "s"),
    "GGT": ("#7b5ea7", "D"),
    "conjugate gradients": ("#edae49", "P"),
    "WoodFisher": ("#3066be", "X"),
    "dense inverse": ("#8d6e63", "*"),
    "SGD": ("#888888", "."),
    **{
        f"mfac, m = {m}": (f"#{hue}", "o")
        for m, hue in {16: "c9e4a5", 64: "8fce6f", 256: "4cc38a", 1024: "0b6e4f"}.items()
    },
    "mfac, m = 1024, top-k 1 %": ("#0b6e4f", "^"),
    "AdaHessian": ("#d1495b", "s"),
    "Shampoo": ("#3066be", "X"),
    "SOAP": ("#7b5ea7", "D"),
    "Muon": ("#edae49", "P"),
}


def draw(record, folder):
    """All of them; returns their names."""
    rows = record["rows"]
    pictures = {
        "peers_step": _sweep(rows, "step", list(steps.NEEDS), ["step"], machine.step_limit, "one step of the window"),
        "peers_product": _sweep(
            rows, "inverse", list(inverses.CONTENDERS), ["set_up", "product"], machine.set_up_limit, "set-up and F⁻¹x"
        ),
        "peers_diagonal": _sweep(
            rows, "inverse", [name for name in inverses.CONTENDERS if name != "conjugate gradients"],
            ["set_up", "diagonal"], machine.set_up_limit, "set-up and diagonal",
        ),
        "peers_memory": _memory(rows),
        "peers_error": _errors(rows),
        "peers_training": _training(rows),
    }  # fmt: skip
    if chosen(rows, "pruning"):
        pictures["peers_pruning"] = _pruning(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        figure.savefig(folder / f"{name}.png", dpi=120)
        plt.close(figure)
    return list(pictures)


def _some(values, count=3):
    """A few of the sizes, the middle ones rather than the ends."""
    values = sorted(values)
    return values if len(values) <= count else values[-1 - count : -1]


def _sweep(rows, task, methods, parts, limit, title):
    """Time against d for some m, and against m for some d; crosses at the top: too slow, or more than the memory."""
    cells, limits = chosen(rows, task), limits_of(rows)
    panels = [("m", "d", m) for m in _some({row["m"] for row in cells})]
    panels += [("d", "m", d) for d in _some({row["d"] for row in cells})]
    width = max(1, len(panels) // 2)
    figure, grid = plt.subplots(2, width, figsize=(4.1 * width, 7.4), sharey=True, squeeze=False, layout="constrained")
    for axes, (fixed, varied, value) in zip(grid.flat, panels, strict=False):
        _lines(axes, cells, methods, parts, fixed, varied, value)
        sizes = sorted({row[varied] for row in cells})
        at_best = [limit(limits, value, k) if fixed == "m" else limit(limits, k, value) for k in sizes]
        axes.loglog(sizes, at_best, "--", color="black", linewidth=1)
        axes.set_title(f"{fixed} = {value:,}", fontsize=10)
        axes.set_xlabel(NAMES[varied])
        _mark_sizes(axes, sizes)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"seconds, {title}")
    _crosses(grid, cells, methods, panels, parts)
    _legend(figure, methods, [_limit_handle(), *_cross_handles()])
    return figure


def _lines(axes, cells, methods, parts, fixed, varied, value):
    for method in methods:
        colour, marker = STYLES[method]
        own = [row for row in cells if row["method"] == method and row[fixed] == value]
        points = sorted((row[varied], time_of(row, parts)) for row in own if time_of(row, parts) is not None)
        if points:
            width = 2.2 if method.startswith("mfac") else 1.3
            axes.loglog(*zip(*points, strict=True), marker=marker, color=colour, linewidth=width, markersize=5)


def _crosses(grid, cells, methods, panels, parts):
    """Cells without figures, in a strip above the highest line: one height a method."""
    missing = [row for row in cells if row["method"] in methods and time_of(row, parts) is None]
    absent = [method for method in methods if any(row["method"] == method for row in missing)]
    heights = {method: place for place, method in enumerate(absent)}
    low, top = grid[0, 0].get_ylim()
    if not missing:
        return
    for axes, (fixed, varied, value) in zip(grid.flat, panels, strict=False):
        for row in (row for row in missing if row[fixed] == value):
            mark = "s" if row["outcome"] == "does not fit" else "x"
            height = top * 2.2 ** (heights[row["method"]] + 0.8)
            axes.plot(row[varied], height, mark, color=STYLES[row["method"]][0], markersize=5, markeredgewidth=1.6)
        axes.axhspan(top, top * 2.2 ** (len(heights) + 0.6), color="#f2f2f2", zorder=0)
        axes.set_yticks([10.0**k for k in range(-6, 5) if low < 10.0**k < top])
    grid[0, 0].set_ylim(low, top * 2.2 ** (len(heights) + 0.6))


def _mark_sizes(axes, sizes):
    """Ticks at the sizes that were measured, and nowhere else."""
    names = [f"$10^{len(str(k)) - 1}$" if str(k).strip("0") == "1" else f"{k:,}" for k in sizes]
    axes.set_xticks(sizes, names, fontsize=9)
    axes.set_xticks([], minor=True)
    axes.grid(True, which="major", linewidth=0.3)


def _limit_handle(label="the machine's limit"):
    return Line2D([], [], linestyle="--", color="black", linewidth=1, label=label)


def _cross_handles():
    grey = {"linestyle": "", "color": THEIRS, "markersize": 5}
    return [
        Line2D([], [], marker="x", markeredgewidth=1.6, label="too slow: stopped", **grey),
        Line2D([], [], marker="s", label="does not fit into memory", **grey),
    ]


def _legend(figure, methods, more=()):
    handles = [Line2D([], [], color=STYLES[name][0], marker=STYLES[name][1], label=name) for name in methods]
    figure.legend(handles=[*handles, *more], loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def _memory(rows):
    """Peaks, gradients included: above of a fixed set, below of a window; against d for one m, against m for one d."""
    both = chosen(rows, "inverse") + chosen(rows, "step")
    sizes = {axis: sorted({row[axis] for row in both}) for axis in "dm"}
    middle = {axis: values[len(values) // 2] for axis, values in sizes.items()}
    figure, grid = plt.subplots(2, 2, figsize=(10, 8), sharey=True, layout="constrained")
    for line, task in zip(grid, ("inverse", "step"), strict=True):
        for axes, (fixed, varied) in zip(line, (("m", "d"), ("d", "m")), strict=True):
            _peaks(axes, [row for row in chosen(rows, task) if row[fixed] == middle[fixed]], varied)
            axes.axhline(limits_of(rows)["memory_bytes"], linestyle="--", color="black", linewidth=1)
            what = "a fixed set" if task == "inverse" else "a window"
            axes.set(title=f"{what}, {fixed} = {middle[fixed]:,}", xlabel=NAMES[varied])
    for axes in grid[:, 0]:
        axes.set_ylabel("bytes at the peak, with the gradients")
    hollow = {"linestyle": "", "marker": "o", "color": THEIRS, "markerfacecolor": "white"}
    more = [Line2D([], [], label="computed: does not fit", **hollow), _limit_handle("memory that was free")]
    _legend(figure, list(dict.fromkeys(row["method"] for row in both)), more)
    return figure


def _peaks(axes, cells, varied):
    for method in dict.fromkeys(row["method"] for row in cells):
        some = sorted((row for row in cells if row["method"] == method), key=lambda row: row[varied])
        points = [(row[varied], row["peak_bytes"]) for row in some if row["outcome"] == "measured"]
        colour, marker = STYLES[method]
        if points:
            axes.loglog(*zip(*points, strict=True), marker=marker, color=colour)
        for row in some:
            if row["outcome"] == "does not fit":
                axes.loglog(row[varied], row["bytes_needed"], marker=marker, color=colour, markerfacecolor="white")
    _mark_sizes(axes, sorted({row[varied] for row in cells}))


def _errors(rows):
    """Of everybody against m, all d: what they differ from float64."""
    figure, grid = plt.subplots(1, 3, figsize=(12, 4.6), sharey=True, layout="constrained")
    shown = {}
    parts = (("inverse", "product", "F⁻¹x"), ("inverse", "diagonal", "diagonal"), ("step", "step", "step F⁻¹g"))
    for axes, (task, part, title) in zip(grid, parts, strict=True):
        for row in (row for row in chosen(rows, task) if row.get(f"{part}_error")):
            colour, marker = STYLES[row["method"]]
            # A little beside one another: methods at the same m would cover one another.
            m = row["m"] * 1.07 ** (list(STYLES).index(row["method"]) % 7 - 3)
            look = {"marker": marker, "color": colour, "markersize": 6, "alpha": 0.8}
            axes.loglog(m, row[f"{part}_error"], linestyle="", **look)
            shown[row["method"]] = None
        _mark_sizes(axes, sorted({row["m"] for row in chosen(rows, task)}))
        axes.axhline(1e-4, color="black", linestyle="--", linewidth=1)
        axes.set(title=title, xlabel="gradients m")
    grid[0].set_ylabel("relative error against float64")
    _legend(figure, list(shown), [_limit_handle("what mfac promises: 1e-4")])
    return figure


def _training(rows):
    cells = chosen(rows, "training")
    figure, (times, memory) = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    present = [name for name in training.CONTENDERS if any(row["method"] == name for row in cells)]
    for method in present:
        colour, marker = STYLES[method]
        some = [row for row in chosen(rows, "training", method) if row["outcome"] == "measured"]
        some.sort(key=lambda row: row["d"])
        d = [row["d"] for row in some]
        dash = ":" if "top-k" in method else "-"
        times.loglog(d, [row["training_step_s"] for row in some], dash, marker=marker, color=colour)
        memory.loglog(d, [max(1e5, row["peak_bytes"]) for row in some], dash, marker=marker, color=colour)
    times.set(xlabel="weights d", ylabel="seconds", title="a training step: forward, backward, step")
    memory.set(xlabel="weights d", ylabel="bytes beside the model, at the peak", title="memory")
    memory.axhline(limits_of(rows)["memory_bytes"], linestyle="--", color="black", linewidth=1)
    for axes in (times, memory):
        _mark_sizes(axes, sorted({row["d"] for row in cells}))
    _legend(figure, present, [_limit_handle("memory that was free")])
    return figure


def _pruning(rows):
    """Bars by size and method; what was not measured has none."""
    cells = [row for row in chosen(rows, "pruning") if row["outcome"] == "measured"]
    figure, ((losses, times),) = drawing.panels(1, 2, (11, 4.6))
    for axes, key in ((losses, "loss"), (times, "prune_s")):
        groups = {}
        for row in cells:
            groups.setdefault(f"{row['d']:,} weights", {})[row["method"]] = row[key]
        for row in cells if key == "loss" else ():
            groups[f"{row['d']:,} weights"]["before"] = row["dense_loss"]
        drawing.draw_bars(axes, groups)
    times.set_yscale("log")
    losses.set(ylabel="test loss", title="digits at 80 % sparsity, one shot")
    times.set(ylabel="seconds", title="time to prune")
    losses.legend(fontsize=8)
    return figure

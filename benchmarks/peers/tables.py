"""The cells as tables for people: times, what did not fit, how costs grow, errors."""

from statistics import median

from page_text import seconds, size, table
from peers import growth, inverses, machine, steps, training


def chosen(rows, task, method=None):
    return [row for row in rows if row["task"] == task and method in (None, row["method"])]


def limits_of(rows):
    return chosen(rows, "machine")[0]


def time_of(row, parts):
    """The sum of some parts; None where the cell has no figures."""
    if row["outcome"] != "measured" or any(f"{part}_s" not in row for part in parts):
        return None
    return sum(row[f"{part}_s"] for part in parts)


def _reason(row):
    return row["why"].replace("too slow already", "slower than").split(" at d")[0].replace("slower than", "too slow")


def timetable(rows, task, methods, parts, limit):
    """A line a size: what the machine could do at best, and everybody's time, the shortest in bold."""
    found = {(row["method"], row["d"], row["m"]): row for row in chosen(rows, task)}
    sizes = sorted({(d, m) for _, d, m in found})
    lines = []
    for d, m in sizes:
        cells = [found[method, d, m] for method in methods]
        times = [time_of(row, parts) for row in cells]
        best = min((value for value in times if value is not None), default=None)
        shown = [
            _reason(row) if value is None else f"**{seconds(value)}**" if value == best else seconds(value)
            for row, value in zip(cells, times, strict=True)
        ]
        lines.append([f"{d:,}", m, seconds(limit(m, d)), *shown])
    grown = (_grown(rows, task, name, parts) for name in methods)
    lines.append(["*grows as*", "", _power(1, 1 if task == "step" else 2), *grown])
    return table(["d", "m", "limit", *methods], lines)


def _grown(rows, task, method, parts):
    points = [(row["d"], row["m"], time_of(row, parts)) for row in chosen(rows, task, method)]
    return _power(*growth.exponents(points))


def _power(alpha, beta):
    words = [f"{letter}^{value:.2g}" for letter, value in (("d", alpha), ("m", beta)) if value is not None]
    return " ".join(words) or "-"


def step_table(rows):
    limits = limits_of(rows)
    return timetable(rows, "step", list(steps.NEEDS), ["step"], lambda m, d: machine.step_limit(limits, m, d))


def inverse_table(rows, part):
    limits = limits_of(rows)
    able = [name for name in inverses.CONTENDERS if part == "product" or name != "conjugate gradients"]
    return timetable(rows, "inverse", able, ["set_up", part], lambda m, d: machine.set_up_limit(limits, m, d))


def error_table(rows):
    """Median and worst over all sizes."""
    lines = []
    for name in dict.fromkeys([*inverses.CONTENDERS, *steps.NEEDS]):
        tasks = (("inverse", "product"), ("inverse", "diagonal"), ("step", "step"))
        found = [_errors(rows, task, name, part) for task, part in tasks]
        if any(found):
            lines.append([name, *(f"{median(some):.1e}, {max(some):.1e}" if some else "" for some in found)])
    return table(["median and worst relative error", "F⁻¹x", "diagonal", "step F⁻¹g"], lines)


def _errors(rows, task, method, part):
    found = [row.get(f"{part}_error") for row in chosen(rows, task, method)]
    return [value for value in found if value is not None]


def training_table(rows):
    """Time beside forward and backward, and memory beside the model's, of every optimizer."""
    found = {(row["method"], row["d"]): row for row in chosen(rows, "training")}
    sizes = sorted({d for _, d in found})
    lines = []
    for method in training.CONTENDERS:
        if (method, sizes[0]) in found:
            lines.append([method, *(_training_cell(found[method, d]) for d in sizes)])
    gradient = [seconds(found["SGD", d]["gradient_s"]) for d in sizes]
    lines.append(["*forward and backward*", *gradient])
    return table(["beside forward and backward", *(f"d = {d:,}" for d in sizes)], lines)


def _training_cell(row):
    if row["outcome"] != "measured":
        return _reason(row)
    return f"{seconds(max(0.0, row['training_step_s'] - row['gradient_s']))}, {size(max(0, row['peak_bytes']))}"


def pruning_table(rows):
    found = chosen(rows, "pruning")
    sizes = sorted({row["d"] for row in found})
    lines = []
    for method in dict.fromkeys(row["method"] for row in found):
        cells = [row for row in found if row["method"] == method]
        lines.append([method, *(_pruning_cell(row) for row in cells)])
    dense = [next((row for row in found if row["d"] == d and "dense_loss" in row), None) for d in sizes]
    lines.append(
        ["*before*", *("" if row is None else f"{row['dense_loss']:.3f}, {row['dense_accuracy']:.1%}" for row in dense)]
    )
    return table(["test loss and accuracy, time", *(f"d = {d:,}" for d in sizes)], lines)


def _pruning_cell(row):
    if row["outcome"] != "measured":
        return _reason(row)
    return f"{row['loss']:.3f}, {row['accuracy']:.1%}, {seconds(row['prune_s'])}"

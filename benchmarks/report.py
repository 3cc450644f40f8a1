"""Puts the committed results into docs/benchmarks.md: tables between its markers, and the plots beside it."""

import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from page_text import measured_on, seconds, table
from timing import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
IMAGES = PAGE.parent / "images"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def static():
    record = load("static")
    rows = [
        [
            f"{row['d']:,}",
            row["m"],
            seconds(row["ours_s"]),
            seconds(row["paper_s"]),
            f"**{row['times_faster_than_algorithm_3']:.1f}**",
            f"**{row['of_the_flop_limit']:.2f}**",
            f"{row['float64_of_the_flop_limit']:.2f}",
            f"{row['matmul_gflops']:.0f} Gflop/s",
        ]
        for row in record["rows"]
    ]
    heads = ["d", "m", "mfac", "Algorithm 3", "times faster", "of the limit", "in float64", "matrix product"]
    return table(heads, rows) + "\n\n" + measured_on(record)


def blocks():
    record = load("blocks")
    rows = [
        [
            f"{row['d']:,}",
            row["m"],
            row["block_size"],
            seconds(row["ours_s"]),
            seconds(row["paper_s"]),
            f"**{row['times_faster_than_algorithm_3']:.1f}**",
            f"{row['of_reading_and_multiplying_once']:.1f}",
        ]
        for row in record["rows"]
    ]
    heads = ["d", "m", "block", "mfac", "Algorithm 3", "times faster", "of multiplying G once"]
    return table(heads, rows) + "\n\n" + measured_on(record)


def dynamic():
    record = load("dynamic")
    rows = [
        [
            f"{row['d']:,}",
            row["m"],
            row["passes"],
            seconds(row["ours_s"]),
            seconds(row["two_passes_s"]),
            f"**{row['of_two_bare_passes']:.2f}**",
            seconds(row["paper_s"]),
            f"**{row['times_faster_than_algorithms_1_and_2']:.1f}**",
        ]
        for row in record["rows"]
    ]
    heads = ["d", "m", "passes in", "mfac", "two bare passes", "ratio", "Algorithms 1 and 2", "times faster"]
    return table(heads, rows) + "\n\n" + measured_on(record)


def scaling():
    record = load("scaling")
    kinds = ["set_up_and_diagonal", "product", "update_and_apply"]
    rows = [
        [f"{row['d']:,}", *(f"{seconds(row[f'{kind}_s'])} ({row[f'{kind}_ns_a_weight']:.0f} ns)" for kind in kinds)]
        for row in record["rows"]
    ]
    _plot_scaling(record["rows"], kinds)
    heads = ["d", "set-up and diagonal (a weight)", "product", "update_and_apply"]
    return table(heads, rows) + "\n\n![time against d](images/scaling.png)\n\n" + measured_on(record)


def _plot_scaling(rows, kinds):
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    d = [row["d"] for row in rows]
    for kind, style in zip(kinds, ("o-", "s--", "^:"), strict=True):
        axes.loglog(d, [row[f"{kind}_s"] for row in rows], style, label=kind.replace("_", " "))
    first = rows[0]["product_s"]
    axes.loglog(d, [first * x / d[0] for x in d], color="gray", linewidth=0.8, label="linear")
    axes.set(xlabel="weights d", ylabel="seconds", title="Cost against the number of weights, m = 64, float32")
    axes.legend()
    figure.savefig(IMAGES / "scaling.png", dpi=140)


def pages():
    record = load("pages")
    rows = [
        [
            f"{row['d']:,}",
            row["m"],
            f"{row['gib_on_disk']} GiB",
            seconds(row["disk_s"]),
            seconds(row["memory_s"]),
            f"**{row['of_the_time_in_memory']:.2f}**",
            f"**{row['peak_resident_gib']:.2f} GiB**",
            f"{row['peak_resident_in_memory_gib']:.2f} GiB",
        ]
        for row in record["rows"]
    ]
    heads = ["d", "m", "on disk", "from disk", "in memory", "ratio", "peak resident", "peak, all in memory"]
    return table(heads, rows) + "\n\n" + measured_on(record)


def gradients():
    record = load("gradients")
    rows = []
    for name in ("mlp", "wide_mlp", "bert_tiny", "resnet20", "lstm", "packed_lstm"):
        model, singles = record[name], record[name]["per_sample"]
        rows.append([name.replace("_", "-"), f"{model['parameters']:,}", "128", *_of_batches(model["batch"])])
        rows[-1] += [f"{singles['rows_per_second']}", f"**{singles['speedup']:.2f}**", f"{singles['loop_speedup']:.2f}"]
        larger = [key for key in model if key.startswith("batch of ")]
        rows += [["", "", key.removeprefix("batch of "), *_of_batches(model[key]), "", "", ""] for key in larger]
    heads = ["model", "weights", "batch", "rows/s, a batch each", "of the plain loop"]
    heads += ["overhead (the plain loop's, writing alone)", "rows/s, a sample each", "of the plain loop", "one by one"]
    memory = record["peak_memory"]
    peak = ", ".join(
        f"{figures['peak_rise_mib']:.0f} MiB for {figures['rows_mib']:.0f} MiB of rows ({mode.replace('_', ' ')})"
        for mode, figures in memory.items()
    )
    return f"{table(heads, rows)}\n\nPeak memory, in a process of its own: {peak}.\n\n{measured_on(record)}"


def _of_batches(figures):
    overhead = "{overhead:.1%} ({plain_overhead:.1%}, {write:.1%})".format(**figures)
    return [f"{figures['rows_per_second']}", f"**{figures['speedup']:.2f}**", overhead]


def optimizer():
    record = load("optimizer")
    rows = [row for row in record["rows"] if row["what"] == "step"]
    steps = [
        [
            f"{row['d']:,}",
            row["tensors"],
            row["m"],
            seconds(row["ours_s"]),
            seconds(row["two_passes_s"]),
            f"**{row['of_two_bare_passes']:.2f}**",
            f"{row['beyond_them_ms']:.2f} ms",
        ]
        for row in rows
    ]
    heads = ["weights", "tensors", "m", "`step()`", "two bare passes", "ratio", "beyond them"]
    training = [row for row in record["rows"] if "over_sgd" in row]
    overhead = [
        [row["optimizer"], row["format"].replace("_", " "), seconds(row["seconds"]), f"**{row['over_sgd']:.2f}**"]
        for row in training
    ]
    sparse = next(row for row in record["rows"] if "time_of_dense" in row)
    return "\n\n".join(
        (
            table(heads, steps),
            f"At 90 % sparsity, {sparse['d']:,} weights, m = {sparse['m']}: {sparse['time_of_dense']:.2f} of the time "
            f"and {sparse['window_of_dense']:.2f} of the window of the dense step.",
            table(["ResNet20, batch 128", "memory format", "a training step", "of SGD's"], overhead),
            measured_on(record),
        )
    )


def windows():
    record = load("windows")
    rows = [
        [
            f"{row['d']:,}",
            row["m"],
            row["storage"],
            f"{row['bytes'] / 1e9:.2f} GB",
            f"{row['bytes_of_float32']:.3f}",
            seconds(row["step_s"]),
            "float32 does not fit" if row["time_of_float32"] is None else f"**{row['time_of_float32']:.2f}**",
        ]
        for row in record["rows"]
        if row["what"] == "step"
    ]
    heads = ["weights", "m", "storage", "window", "of float32", "step", "of float32's"]
    return table(heads, rows) + "\n\n" + measured_on(record)


def files():
    record = load("files")
    rows = [
        [
            row["storage"],
            f"{row['bytes'] / 1e6:.1f} MB ({row['of_float32']:.3f})",
            seconds(row["collect_s"]),
            seconds(row["set_up_and_diagonal_s"]),
            f"{row['cosine']:.4f}",
            f"{row['diagonal_correlation']:.3f}",
        ]
        for row in record["rows"]
    ]
    heads = ["storage", "file (of float32)", "collecting", "set-up and diagonal", "cosine of F⁻¹x", "diagonal"]
    return table(heads, rows) + "\n\n" + measured_on(record)


def profile_step():
    record = load("profile_step")
    parts = list(record["rows"][0]["parts_s"])
    rows = [
        [
            f"{row['d']:,}",
            row["m"],
            seconds(row["whole_s"]),
            f"**{row['whole_s'] / row['bare_passes_s']:.2f}**",
            *(f"{seconds(row['parts_s'][part])} ({row['parts_s'][part] / row['whole_s']:.0%})" for part in parts),
        ]
        for row in record["rows"]
    ]
    _plot_profile(record["rows"], parts)
    heads = ["d", "m", "step", "of two bare passes", *parts]
    picture = "![where the time of a step goes](images/profile_step.png)"
    return f"{picture}\n\n{table(heads, rows)}\n\n{measured_on(record)}"


def _plot_profile(rows, parts):
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    names = [f"d = {row['d']:,}\nm = {row['m']:,}" for row in rows]
    left = [0.0] * len(rows)
    for part, colour in zip(parts, ("#3066be", "#edae49", "#d1495b", "#bbbbbb"), strict=True):
        shares = [100 * row["parts_s"][part] / row["whole_s"] for row in rows]
        axes.barh(names, shares, left=left, label=part, color=colour)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, row in enumerate(rows):
        ratio = row["whole_s"] / row["bare_passes_s"]
        axes.text(102, place, f"{seconds(row['whole_s'])}: {ratio:.2f} of the bare passes", va="center", fontsize=9)
    axes.set(xlabel="% of update_and_apply", xlim=(0, 165), title="Where the time of a step goes")
    axes.set_xticks(range(0, 101, 25))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(IMAGES / "profile_step.png", dpi=140)


def peers():
    from peers import page

    return page.section(load("peers"), IMAGES)


def peers_page(size):
    """The page of a smaller run, beside its record in build/bench."""
    from peers import page

    folder = PAGE.parent.parent / "build" / "bench"
    record = json.loads((folder / f"peers_{size}.json").read_text())
    (folder / f"peers_{size}.md").write_text(f"# Peers\n\n{page.section(record, folder / 'images')}\n")
    print(f"wrote {folder / f'peers_{size}.md'}")


def main():
    for size in ("quick", "smoke"):
        if f"--{size}" in sys.argv:
            return peers_page(size)
    IMAGES.mkdir(exist_ok=True)
    text = PAGE.read_text()
    for name, make in (
        ("peers", peers),
        ("profile_step", profile_step),
        ("windows", windows),
        ("files", files),
        ("static", static),
        ("blocks", blocks),
        ("dynamic", dynamic),
        ("scaling", scaling),
        ("pages", pages),
        ("gradients", gradients),
        ("optimizer", optimizer),
    ):
        marked = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
        assert marked.search(text), f"{PAGE} has no place for {name}"
        if not (RESULTS / f"{name}.json").exists():
            print(f"{name} has not been measured yet: its place on the page stays as it is")
            continue
        made = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        text = text.replace(marked.search(text)[0], made)
    PAGE.write_text(text)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()

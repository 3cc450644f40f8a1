"""Puts the committed results into docs/benchmarks.md: tables between its markers, and the plots beside it.

python benchmarks/report.py [NAME...]        # all sections, or some
python benchmarks/report.py --quick          # a page of a smaller run of the peers, in build/bench
"""

import json
import re
import sys
from pathlib import Path

from page_text import measured_on, seconds, table
from timing import RESULTS

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, the folder of experiments is not on the path
from experiments import drawing

SECTIONS = ("peers", "profile_step", "windows", "files", "static", "blocks", "dynamic", "scaling", "pages",
            "gradients", "optimizer")  # fmt: skip
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
IMAGES = PAGE.parent / "images"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def page_table(name, columns, wanted=lambda row: True):
    """The rows of a record under {head: row -> text}, and the machine."""
    record = load(name)
    return f"{columns_of(filter(wanted, record['rows']), columns)}\n\n{measured_on(record)}"


def columns_of(rows, columns):
    return table(list(columns), [[show(row) for show in columns.values()] for row in rows])


def time_of(key):
    return lambda row: seconds(row[key]) if key in row else "–"


def bold(key, digits):
    return lambda row: f"**{row[key]:.{digits}f}**" if key in row else "–"


SIZE = {"d": lambda row: f"{row['d']:,}", "m": lambda row: row["m"]}


KIND = {"gradients": lambda row: row.get("gradients", "norm 1")}
PRODUCTS = {
    "`@`, of two passes": lambda row: f"{row['applied_of_two_passes']:.2f}",
    "error of the diagonal": lambda row: f"{row['largest_error_of_the_diagonal']:.0e}",
}


def static():
    return page_table("static", KIND | SIZE | {
        "λ": lambda row: f"{row.get('damping', 1e-5):g}",
        "mfac": time_of("ours_s"),
        "Algorithm 3": time_of("paper_s"),
        "times faster": bold("times_faster_than_algorithm_3", 1),
        "of the limit": bold("of_the_flop_limit", 2),
        "in float64": lambda row: f"{row['float64_of_the_flop_limit']:.2f}",
        "matrix product": lambda row: f"{row['matmul_gflops']:.0f} Gflop/s",
    } | PRODUCTS)  # fmt: skip


def blocks():
    return page_table("blocks", KIND | SIZE | {
        "block": lambda row: row["block_size"],
        "mfac": time_of("ours_s"),
        "Algorithm 3": time_of("paper_s"),
        "times faster": bold("times_faster_than_algorithm_3", 1),
        "of multiplying G once": lambda row: f"{row['of_reading_and_multiplying_once']:.1f}",
    })  # fmt: skip


def dynamic():
    return page_table("dynamic", SIZE | {
        "passes in": lambda row: row["passes"],
        "mfac": time_of("ours_s"),
        "two bare passes": time_of("two_passes_s"),
        "ratio": bold("of_two_bare_passes", 2),
        "Algorithms 1 and 2": time_of("paper_s"),
        "times faster": bold("times_faster_than_algorithms_1_and_2", 1),
    })  # fmt: skip


def scaling():
    record = load("scaling")
    kinds = ["set_up_and_diagonal", "product", "update_and_apply"]
    rows = [
        [f"{row['d']:,}", *(f"{seconds(row[f'{kind}_s'])} ({row[f'{kind}_ns_a_weight']:.0f} ns)" for kind in kinds)]
        for row in record["rows"]
    ]
    d = [row["d"] for row in record["rows"]]
    curves = {kind.replace("_", " "): (d, [row[f"{kind}_s"] for row in record["rows"]]) for kind in kinds}
    curves["linear"] = d, [record["rows"][0]["product_s"] * x / d[0] for x in d]
    title = "Cost against the number of weights, m = 64, float32"
    scales = {"xscale": "log", "yscale": "log"}
    drawing.lines(IMAGES / "scaling.png", curves, x="weights d", y="seconds", title=title, **scales)
    heads = ["d", "set-up and diagonal (a weight)", "product", "update_and_apply"]
    return table(heads, rows) + "\n\n![time against d](images/scaling.png)\n\n" + measured_on(record)


def pages():
    return page_table("pages", SIZE | {
        "on disk": lambda row: f"{row['gib_on_disk']} GiB",
        "from disk": time_of("disk_s"),
        "in memory": time_of("memory_s"),
        "ratio": bold("of_the_time_in_memory", 2),
        "peak resident": lambda row: f"**{row['peak_resident_gib']:.2f} GiB**",
        "peak, all in memory": lambda row: f"{row['peak_resident_in_memory_gib']:.2f} GiB",
    })  # fmt: skip


def gradients():
    record = load("gradients")
    models = columns_of((row for row in record["rows"] if row["what"] == "rows"), {
        "model": lambda row: row["model"].replace("_", "-"),
        "weights": lambda row: f"{row['parameters']:,}",
        "batch": lambda row: 128,
        "rows/s, a batch each": lambda row: row["rows_per_second"],
        "of the plain loop": bold("speedup", 2),
        "overhead (the plain loop's)": lambda row: f"{row['overhead']:.1%} ({row['plain_overhead']:.1%})",
        "rows/s, a sample each": lambda row: row["sample_rows_per_second"],
        "of the plain loop, by sample": bold("sample_speedup", 2),
        "one by one": lambda row: f"{row['sample_loop_speedup']:.2f}",
    })  # fmt: skip
    peak = ", ".join(
        f"{row['peak_rise_mib']:.0f} MiB for {row['rows_mib']:.0f} MiB of rows ({row['mode'].replace('_', ' ')})"
        for row in record["rows"] if row["what"] == "peak memory"
    )  # fmt: skip
    return f"{models}\n\nPeak memory, in a process of its own: {peak}.\n\n{measured_on(record)}"


def optimizer():
    record = load("optimizer")
    steps = columns_of((row for row in record["rows"] if row["what"] == "step"), {
        "weights": SIZE["d"],
        "tensors": lambda row: row["tensors"],
        "m": SIZE["m"],
        "`step()`": time_of("ours_s"),
        "two bare passes": time_of("two_passes_s"),
        "ratio": bold("of_two_bare_passes", 2),
        "beyond them": lambda row: f"{row['beyond_them_ms']:.2f} ms",
    })  # fmt: skip
    overhead = columns_of((row for row in record["rows"] if "over_sgd" in row), {
        "ResNet20, batch 128": lambda row: row["optimizer"],
        "memory format": lambda row: row["format"].replace("_", " "),
        "a training step": time_of("seconds"),
        "of SGD's": bold("over_sgd", 2),
    })  # fmt: skip
    sparse = next(row for row in record["rows"] if "time_of_dense" in row)
    text = f"At 90 % sparsity, {sparse['d']:,} weights, m = {sparse['m']}: {sparse['time_of_dense']:.2f} of the time "
    text += f"and {sparse['window_of_dense']:.2f} of the window of the dense step."
    return "\n\n".join((steps, text, overhead, measured_on(record)))


def windows():
    columns = {
        "weights": SIZE["d"],
        "m": SIZE["m"],
        "storage": lambda row: row["storage"],
        "window": lambda row: f"{row['bytes'] / 1e9:.2f} GB",
        "of float32": lambda row: f"{row['bytes_of_float32']:.3f}",
        "step": time_of("step_s"),
        "of float32's": lambda r: f"**{r['time_of_float32']:.2f}**" if r["time_of_float32"] else "float32 does not fit",
    }
    return page_table("windows", columns, lambda row: row["what"] == "step")


def files():
    return page_table("files", {
        "storage": lambda row: row["storage"],
        "file (of float32)": lambda row: f"{row['bytes'] / 1e6:.1f} MB ({row['of_float32']:.3f})",
        "collecting": time_of("collect_s"),
        "set-up and diagonal": time_of("set_up_and_diagonal_s"),
        "cosine of F⁻¹x": lambda row: f"{row['cosine']:.4f}",
        "diagonal": lambda row: f"{row['diagonal_correlation']:.3f}",
    })  # fmt: skip


def profile_step():
    record = load("profile_step")
    parts = list(record["rows"][0]["parts_s"])
    _plot_profile(record["rows"], parts)
    columns = SIZE | {
        "step": time_of("whole_s"),
        "of two bare passes": lambda row: f"**{row['whole_s'] / row['bare_passes_s']:.2f}**",
    }
    for part in parts:
        columns[part] = lambda row, part=part: (
            f"{seconds(row['parts_s'][part])} ({row['parts_s'][part] / row['whole_s']:.0%})"
        )
    return "![where the time of a step goes](images/profile_step.png)\n\n" + page_table("profile_step", columns)


def _plot_profile(rows, parts):
    figure, ((axes,),) = drawing.panels(size=(8, 4.2))
    axes.grid(False)
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
    drawing.save(figure, IMAGES / "profile_step.png")


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
    for name in SECTIONS:
        marked = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
        assert marked.search(text), f"{PAGE} has no place for {name}"
        if not (RESULTS / f"{name}.json").exists():
            print(f"{name} has not been measured yet: its place on the page stays as it is")
        elif not sys.argv[1:] or name in sys.argv[1:]:
            section = f"<!-- {name} -->\n{globals()[name]()}\n<!-- /{name} -->"
            text = text.replace(marked.search(text)[0], section)
    PAGE.write_text(text)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()

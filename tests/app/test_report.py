"""The page of a run: all its plots and tables."""

import copy
import re
from itertools import pairwise

import pytest
import report_cases as cases
from report_page import ALL, names_of_axes, page, page_of, text_of

from mfac.app.report import render_page, write_page
from mfac.app.report.quantities import significant

SPACE = "\N{NO-BREAK SPACE}"
every_page = pytest.mark.parametrize("name", ALL)


@every_page
def test_the_page_is_well_formed_and_accessible(name):
    text, found = text_of(name), page(name)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert len(found.ids()) == len(set(found.ids()))
    levels = [int(one["tag"][1]) for one in found.elements if re.fullmatch(r"h[1-6]", one["tag"])]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for drawing in found.find("svg"):
        assert drawing.get("aria-hidden") == "true" or drawing["role"] == "img"
        if "aria-labelledby" in drawing:
            title, description = drawing["aria-labelledby"].split()
            assert found.find("title", id=title)[0]["text"]
            assert found.find("desc", id=description)[0]["text"]
    for link in found.find("a"):
        assert link["href"].removeprefix("#") in found.ids()


@every_page
def test_nothing_comes_from_elsewhere(name):
    text = text_of(name)
    assert "http://" not in text
    assert "https://" not in text
    found = page(name)
    assert {one["tag"] for one in found.elements}.isdisjoint({"script", "img", "iframe", "object", "embed"})
    assert [one["href"] for one in found.find("link")] == ["data:,"]
    assert "@import" not in text
    assert "url(" not in text


@every_page
def test_no_number_is_left_over_from_a_failed_division_or_a_missing_value(name):
    for element in page(name).elements:
        for key in ("d", "x", "y", "width", "height", "viewBox"):
            assert not re.search("nan|inf|None", element.get(key) or "")
        if element["tag"] in ("text", "td"):
            assert element["text"] not in ("nan", "inf", "None")


@every_page
def test_the_same_runs_give_the_same_page_and_stay_as_they_are(name):
    before = copy.deepcopy(ALL[name])
    assert render_page(ALL[name]) == render_page(before)
    assert ALL[name] == before


PRUNE_PLOTS = {
    "prune-measure-0": ["accuracy (%)", "sparsity (% of weights removed)"],
    "prune-loss": ["loss", "sparsity (% of weights removed)"],
    "layers-0": ["sparsity asked for (%)", "layer"],
    "layers-1": ["sparsity asked for (%)", "layer"],
    "steps-predicted": ["true increase of the loss, log scale", "predicted increase of the loss, log scale"],
    "steps-loss": ["loss on a few training batches", "sparsity (% of weights removed)"],
    "prune-time": ["time (s)"],
    "prune-memory": ["peak memory (MiB)"],
    "prune-files": ["size of the file (KiB)"],
}
TRAIN_PLOTS = {
    "eval-measure-0-step": ["accuracy (%)", "step"],
    "eval-measure-0-second": ["accuracy (%)", "time (s)"],
    "eval-loss-step": ["loss", "step"],
    "eval-loss-second": ["loss", "time (s)"],
    "training-loss-step": ["training loss", "step"],
    "training-loss-second": ["training loss", "time (s)"],
    "train-time": ["time (s)"],
    "train-memory": ["peak memory (GiB)"],
}


@pytest.mark.parametrize(("ident", "names"), PRUNE_PLOTS.items(), ids=PRUNE_PLOTS)
def test_plots_of_a_pruning(ident, names):
    check_plot(page("pruning").figure(ident), names)


@pytest.mark.parametrize(("ident", "names"), TRAIN_PLOTS.items(), ids=TRAIN_PLOTS)
def test_plots_of_a_training(ident, names):
    check_plot(page("training").figure(ident), names)


@pytest.mark.parametrize("ident", ["tuning-loss-step", "tuning-loss-second"])
def test_plots_of_the_training_in_gradual_pruning(ident):
    axis = "step" if ident.endswith("step") else "time (s)"
    check_plot(page("gradual").figure(ident), ["training loss", axis])


def check_plot(part, names):
    """Axis names, the drawing, and the table behind it in a `details`."""
    assert [name.removesuffix(", log scale") for name in names_of_axes(part)] == [
        name.removesuffix(", log scale") for name in names
    ]
    assert any(one["tag"] == "svg" and one.get("role") == "img" for one in part)
    assert [one for one in part if one["tag"] == "table" and "details" in one["inside"]]


def test_there_are_no_other_plots_than_these():
    figures = page("pruning").find("figure") + page("training").find("figure")
    assert [one["id"] for one in figures] == list(PRUNE_PLOTS) + list(TRAIN_PLOTS)


VALUES = """
    mfac       50 50.01 0.07710 97.8 33.92 1.89
    mfac       80 80.01 0.1312  96.9 14.72 4.35
    mfac       90 90.01 0.2188  95.1 8.319 7.69
    mfac       95 95.01 0.4476  88.9 5.119 12.5
    magnitude  50 50.01 0.07840 98.3 33.92 1.89
    magnitude  80 80.01 0.7468  72.8 14.72 4.35
    magnitude  90 90.01 1.610   42.5 8.319 7.69
    magnitude  95 95.01 2.155   11.7 5.119 12.5
"""


@pytest.mark.parametrize("line", VALUES.split("\n")[1:-1])
def test_every_value_of_every_cell_is_in_a_table(line):
    label, at, sparsity, loss, measure, compact, smaller = line.split()
    rows, at = page("pruning").rows(), f"{at}{SPACE}%"
    assert [label, at, sparsity, loss, measure, "3.250", "2.875", "421.0", smaller] in rows
    assert [label, at, sparsity, measure] in rows
    assert [label, at, sparsity, loss] in rows
    assert [label, at, "64.00", compact, smaller] in rows
    assert [label, at, "weights", f"{label}-0.{at[:-2].rstrip('0')}/weights.safetensors"] in rows


def test_every_layer_and_every_step_is_in_a_table():
    rows = page("pruning").rows()
    kept = [int(1000 * (1 - asked) * 0.9) for asked in cases.ASKED]
    assert ["0.weight", "1,000", *(f"{100 - count / 10:.2f}" for count in kept)] in rows
    assert [f"mfac at 90{SPACE}%", "3", "33.75", "4.000e-05", "0.01000"] in rows
    assert [f"mfac at 90{SPACE}%", "3", "33.75", "0.07000", "0.08000"] in rows
    assert [f"magnitude at 90{SPACE}%", "3", "33.75", "–", "0.01000"] in rows


def test_every_training_is_in_a_table():
    rows = page("training").rows()
    for label in ("mfac", "adam", "sgd"):
        found = [row for row in rows if row[0] == label and len(row) == 8]
        assert [row[1] for row in found] == ["0", "1", "2"]
        last = cases.train_cell(label, 2)["losses"][-1]
        assert found[2][2:4] == ["200", significant(last)]
        assert found[2][5] == f"{100 * (1 - 0.4 * last / 2.3):.1f}"
        assert found[2][6:] == ["4.125", "3.000"]


def test_a_sentence_and_a_small_table_come_first():
    found = page("pruning")
    (lede,) = found.find("p", **{"class": "lede"})
    assert lede["text"].replace(SPACE, " ") == (
        "At 90 % sparsity mfac keeps 95.1 % accuracy, magnitude 42.5 %; dense 97.1 %."
    )
    assert [text.replace(SPACE, " ") for text in found.rows()[0]] == ["method", "50 %", "80 %", "90 %", "95 %"]
    assert found.rows()[1] == ["mfac", "97.8", "96.9", "95.1", "88.9"]
    assert [one["text"] for one in found.find("strong")] == ["96.9", "95.1", "88.9", "98.3"]


def test_the_sentence_of_a_training_has_the_mean_over_seeds():
    run = cases.training(labels=("mfac", "sgd"))
    for cell in run["cells"]:
        cell["evaluations"][-1]["measure"] = {"mfac": 0.95, "sgd": 0.9}[cell["label"]] + 0.01 * cell["seed"]
    (lede,) = page_of(run).find("p", **{"class": "lede"})
    assert lede["text"].replace(SPACE, " ") == (
        "At the end of training mfac reaches 96.0 % accuracy, sgd 91.0 % (mean over 3 seeds)."
    )
    assert ["mfac", "3", "200", "96.0", "95.0", "97.0"] in page_of(run).rows()


def test_a_measure_that_should_be_low_is_ranked_from_the_lowest():
    run = cases.pruning()
    run["task"] |= {"measure": "perplexity", "higher_is_better": False}
    (lede,) = page_of(run).find("p", **{"class": "lede"})
    assert lede["text"].replace(SPACE, " ").startswith("At 90 % sparsity magnitude has perplexity of 0.4250, mfac")


def test_without_a_measure_the_loss_takes_its_place():
    run = cases.pruning(dense={"loss": 0.0746, "measure": None})
    for cell in run["cells"]:
        cell["measure"] = None
    found = page_of(run)
    (lede,) = found.find("p", **{"class": "lede"})
    assert lede["text"].replace(SPACE, " ") == (
        "At 90 % sparsity mfac has a loss of 0.2188, magnitude 1.610; dense 0.07460."
    )
    assert "prune-measure-0" not in found.ids()
    assert "prune-loss" in found.ids()


def test_series_differ_in_shape_and_dashes_not_in_colour_alone():
    part = page("twenty").figure("prune-loss")
    swatches = [i for i, one in enumerate(part) if one.get("class") == "swatch"]
    looks = []
    for start, end in zip(swatches, [*swatches[1:], None], strict=True):
        line, *marks = [one for one in part[start:end] if one["tag"] == "path"]
        shape = re.sub(r"^M[\d.]+ [\d.]+", "", marks[0]["d"]) if marks else ""
        looks.append((line.get("stroke-dasharray"), shape, marks[0].get("class") if marks else None))
    assert len(looks) == 21
    assert len(set(looks)) == 21


def test_lines_have_their_names_at_their_ends_where_there_is_room():
    ends = [one["text"] for one in page("pruning").figure("prune-loss") if "end" in (one.get("class") or "").split()]
    assert sorted(ends) == ["dense", "magnitude", "mfac"]
    crowded = page("twenty").figure("prune-loss")
    assert not [one for one in crowded if "end" in (one.get("class") or "").split()]


def test_settings_and_versions():
    rows = page("pruning").rows()
    for row in (
        ["num_grads", "64"], ["pattern", "none"], ["per_sample", "no"], ["sparsity", "0.5, 0.9"], ["PyTorch", "2.13.0"],
        ["memory (GiB)", "23.5"], ["model", "17,226 weights in 6 tensors"], ["started", "2026-01-01 12:00 UTC"],
        ["took", f"3{SPACE}min 20{SPACE}s"],
    ):  # fmt: skip
        assert row in rows
    assert ["lr", "0.001", "0.001", "0.001"] in page("training").rows()


def test_a_hundred_thousand_steps_are_less_than_a_megabyte():
    losses = [1 / (1 + i / 1000) for i in range(100_000)]
    seconds = [0.01 * i for i in range(100_000)]
    run = cases.training()
    for cell in run["cells"]:
        cell |= {"losses": losses, "seconds": seconds, "steps": 100_000}
    assert len(render_page([run]).encode()) < 400_000


def test_twenty_methods_are_less_than_a_megabyte():
    assert len(text_of("twenty").encode()) < 1_000_000


def test_a_long_history_is_thinned_and_says_so():
    run = cases.pruning(cells=[cases.prune_cell("mfac", 0.9, 0.2, 0.9, steps=3000)])
    for step in run["cells"][0]["steps"]:
        step["predicted_increase"] = 1e-5
    text = render_page([run])
    assert len(text.encode()) < 400_000
    assert "400 of 3,000 rows, evenly spread; run.json has all of them." in text


def test_the_file_is_written_in_full_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    write_page([cases.pruning()], path)
    assert path.read_text(encoding="utf-8") == render_page([cases.pruning()])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="format"):
        write_page([{"format": 2}], path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ValueError, match="does not exist; make it first"):
        write_page([cases.pruning()], tmp_path / "nowhere" / "report.html")


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "a report needs at least one run and got an empty list; pass the contents of run.json files"),
        (["run.json"], "run 1: expected the dict of a run.json, got str; read it with json.load"),
        ([cases.pruning(), {"format": 3}], "run 2: expected format 1, got 3; make the run anew"),
        ([cases.pruning(kind="dance")], "run 1: expected the kind 'prune' or 'train', got 'dance'"),
        ([cases.pruning(cells=None)], "run 1: expected 'cells' to be a list of dicts with a label"),
        ([cases.pruning(cells=[{}])], "run 1: expected 'cells' to be a list of dicts with a label"),
    ],
)
def test_what_is_no_run_is_refused(runs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        render_page(runs)

"""The page of runs in any state: its plots, tables, sentences and links."""

import re
from itertools import pairwise

import numpy as np
import pytest
import report_cases as cases
from report_page import ALL, axis_names, legend, page, page_of, text_of

from mfac.app.report.page import render_page, write_page


@pytest.mark.parametrize("name", ALL)
def test_the_page_is_well_formed_accessible_and_self_contained(name):
    text, found = text_of(name), page(name)
    assert len(found.ids()) == len(set(found.ids()))
    levels = [int(one["tag"][1]) for one in found.elements if re.fullmatch(r"h[1-6]", one["tag"])]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(one["role"] == "img" and one["aria-label"] for one in found.find("svg"))
    local = [one["href"][1:] for one in found.find("a") + found.find("use") if one["href"].startswith("#")]
    assert {*local, *re.findall(r"url\(#([^)]*)\)", text)} <= set(found.ids())
    assert text.count("url(") == text.count("url(#")
    assert not re.search("https?://|@import|<script|<img|<iframe|<object", text)
    for element in found.elements:
        assert not re.search("nan|inf|None", " ".join(element.get(key) or "" for key in ("d", "x", "y", "viewbox")))
        assert element["tag"] not in ("text", "td") or element["text"] not in ("nan", "inf", "None")


SPARSITY = "sparsity (% of weights removed)"
TRACES = {"eval-measure-0": "accuracy (%)", "eval-loss": "loss", "training-loss": "training loss"}
BY = {"step": "step", "second": "time (s)"}
AXES = {
    "pruning": {"prune-measure-0": (SPARSITY, "accuracy (%)"), "prune-loss": (SPARSITY, "loss")},
    "training": {f"{ident}-{kind}": (axis, name) for ident, name in TRACES.items() for kind, axis in BY.items()},
}


@pytest.mark.parametrize("name", AXES)
def test_every_plot_has_its_axes(name):
    figures = {one["id"]: page(name).figure(one["id"]) for one in page(name).find("figure")}
    assert {ident: axis_names(part) for ident, part in figures.items()} == AXES[name]
    assert [one["id"] for one in page("gradual").find("figure")] == ["tuning-loss-step", "tuning-loss-second"]


def test_every_value_of_every_cell_is_in_a_table():
    rows = page("pruning").rows()
    for label in ("mfac", "magnitude"):
        for asked, loss, measure in zip(cases.ASKED, cases.LOSSES[label], cases.MEASURES[label], strict=True):
            sparsity, loss, measure = f"{100 * asked + 0.01:.2f}", f"{loss:#.4g}", f"{100 * measure:.1f}"
            (row,) = [row for row in rows if row[:2] == [label, f"{100 * asked:.1f}"]]
            assert row[2:8] == [sparsity, loss, measure, "3.250", "2.875", "421.0"]
            assert row[10] == "weights, masks"
    assert [row[9] for row in rows if row[:2] in (["mfac", "90.0"], ["mfac", "95.0"])] == ["7.693", "12.50"]
    kept = [int(1000 * (1 - asked) * 0.9) for asked in cases.ASKED]
    assert ["0.weight", "1,000", *(f"{100 - count / 10:.2f}" for count in kept)] in rows
    assert ["35.62", "4.000e-05", "0.01000", "0.08000"] in rows
    assert ["35.62", "–", "0.01000", "0.08000"] in rows
    (training,) = [row for row in page("training").rows() if row[:2] == ["adam", "2"] and len(row) == 9]
    last = cases.train_cell("adam", 2)["losses"][-1]
    assert training[2:6] == ["200", f"{last:#.4g}", f"{last:#.4g}", f"{100 * (1 - 0.4 * last / 2.3):.1f}"]


def test_files_are_linked_relative_to_the_page(tmp_path):
    assert "mfac-0.5/weights.safetensors" in [one["href"] for one in page("pruning").find("a")]
    (tmp_path / "pages").mkdir()
    runs, folders = [cases.pruning("A"), cases.pruning("B")], [tmp_path / "a b", tmp_path / "pages" / "b"]
    write_page(runs, tmp_path / "pages" / "report.html", folders=folders)
    text = (tmp_path / "pages" / "report.html").read_text(encoding="utf-8")
    assert 'href="../a%20b/mfac-0.5/weights.safetensors"' in text
    assert 'href="b/mfac-0.5/weights.safetensors"' in text


def test_a_sentence_and_a_small_table_come_first():
    found = page("pruning")
    lede = found.texts("p", "lede")
    assert lede == ["At 90 % sparsity mfac keeps 95.1 % accuracy, magnitude 42.5 %; dense 97.1 %."]
    assert found.rows()[1] == ["mfac", "97.8", "96.9", "95.1", "88.9"]
    assert found.texts("strong") == ["96.9", "95.1", "88.9", "98.3"]
    run = cases.training(labels=("mfac", "sgd"))
    for cell in run["cells"]:
        cell["evaluations"][-1]["measure"] = {"mfac": 0.95, "sgd": 0.9}[cell["label"]] + 0.01 * cell["seed"]
    found = page_of(run)
    lede = found.texts("p", "lede")
    assert lede == ["At the end of training mfac reaches 96.0 % accuracy, sgd 91.0 % (mean over 3 seeds)."]
    assert ["mfac", "96.0 (95.0 to 97.0)"] in found.rows()
    assert page("empty").texts("p", "lede") == ["No cell is complete yet."]
    assert "16 more down to" in page("twenty").texts("p", "lede")[0]


def test_the_sentence_follows_the_measure_and_falls_back_to_the_loss():
    run = cases.pruning()
    run["task"] |= {"measure": "perplexity", "higher_is_better": False}
    assert page_of(run).texts("p", "lede")[0].startswith("At 90 % sparsity magnitude has perplexity 0.4250, mfac")
    run = cases.pruning(dense={"loss": 0.0746, "measure": None})
    run["cells"] = [cell | {"measure": None} for cell in run["cells"]]
    found = page_of(run)
    assert found.texts("p", "lede") == ["At 90 % sparsity mfac has loss 0.2188, magnitude 1.610; dense 0.07460."]
    assert "prune-measure-0" not in found.ids()


def test_a_method_has_one_colour_on_the_whole_page():
    found = page_of(cases.pruning(labels=("magnitude", "mfac")), cases.training(labels=("sgd", "mfac"), seeds=1))
    figures = [found.figure(one) for one in ("prune-loss", "eval-loss-step", "training-loss-second")]
    colours = {pair for figure in figures for pair in legend(figure).items() if pair[0] != "dense"}
    assert sorted(label for label, _ in colours) == ["magnitude", "mfac", "sgd"]
    assert len({colour for _, colour in colours}) == 3


def test_settings_and_versions():
    rows = page("pruning").rows()
    for row in (
        ["num_grads", "64"], ["pattern", "null"], ["sparsity", "[0.5, 0.9]"], ["damping", "1e-05"], ["torch", "2.13.0"],
        ["model", "17,226 weights in 6 tensors"], ["started", "2026-01-01 12:00 UTC"], ["took", "0:03:20"],
        ["command", "mfac prune digits --seed 7"],
    ):  # fmt: skip
        assert row in rows
    assert ["lr", "0.001", "0.001", "0.001"] in page("training").rows()


def test_long_runs_and_many_methods_stay_small():
    run = cases.training(seeds=1)
    losses = (np.random.default_rng(0).uniform(0.5, 1.5, 100_000) / np.arange(1, 100_001)).tolist()
    run["cells"] = [cell | {"losses": losses, "seconds": losses, "steps": 100_000} for cell in run["cells"]]
    assert len(render_page([run]).encode()) < 500_000
    assert len(text_of("twenty").encode()) < 1_200_000


def test_text_of_the_user_is_text_and_nothing_else():
    found = page("nasty")
    assert found.find("h1")[0]["text"] == found.find("title")[0]["text"] == cases.NASTY
    assert found.find("b") == found.find("script") == []
    texts = {text for row in found.rows() for text in row}
    assert {f"{before}{cases.NASTY}" for before in ("", "mfac prune ", "mfac", "key ", "score ")} <= texts


def test_runs_that_are_unfinished_empty_or_have_gaps():
    note = page_of(cases.pruning("Half", finished=None)).texts("p", "unfinished")
    assert note == ["“Half” is not finished: 8 complete cells so far."]
    assert page("empty").find("figure") == []
    assert ["damping", "1e-05"] in page("empty").rows()
    assert [row for row in page("holes").rows() if row[:2] == ["mfac", "80.0"] and row[3] == "–"]
    run = cases.training(seeds=1)
    for cell in run["cells"]:
        cell |= {"losses": [None] * 200, "evaluations": [cell["evaluations"][-1] | {"loss": None, "measure": None}]}
    found = page_of(run)
    assert found.find("figure") == []
    assert found.texts("p", "lede") == ["No cell has a finite value."]


def test_several_runs_share_a_page():
    found = page("merged")
    assert found.texts("h1") == ["Comparison of 3 runs"]
    names = ["mfac · A", "magnitude · A", "mfac · B", "magnitude · B", "dense"]
    assert list(legend(found.figure("prune-loss"))) == names
    assert ["", "A", "B", "Training on digits"] in found.rows()
    assert ["num_grads", "64", "64", "64"] in found.rows()
    other = cases.pruning("A", labels=("mfac",), dense={"loss": 0.5, "measure": 0.5})
    other["task"]["measure"] = "correlation"
    found = page_of(cases.pruning("A", labels=("mfac",)), other)
    names = ["mfac · A (1)", "mfac · A (2)", "dense · A (1)", "dense · A (2)"]
    assert list(legend(found.figure("prune-loss"))) == names
    assert axis_names(found.figure("prune-measure-1"))[1] == "correlation"
    assert len(found.find("p", "lede")) == 2


def test_the_file_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    write_page([cases.pruning()], path)
    before = path.read_text(encoding="utf-8")
    assert before == text_of("pruning")  # the same runs give the same page
    with pytest.raises(ValueError, match="Invalid isoformat"):
        write_page([cases.training() | {"started": "yesterday"}], path)
    assert path.read_text(encoding="utf-8") == before
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ValueError, match="does not exist; create it first"):
        write_page([cases.pruning(cells=[])], tmp_path / "nowhere" / "report.html")

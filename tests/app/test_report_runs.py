"""The page of runs in any state: unfinished, empty, with gaps, several at once."""

import report_cases as cases
from report_page import names_of_axes, page, page_of

SPACE = "\N{NO-BREAK SPACE}"


def test_text_of_the_user_is_text_and_nothing_else():
    found = page("nasty")
    assert found.find("h1")[0]["text"] == cases.NASTY
    assert found.find("title")[0]["text"] == cases.NASTY
    assert [one["text"] for one in found.find("pre")] == [f"mfac prune {cases.NASTY}"]
    assert found.find("b") == []
    assert found.find("script") == []
    rows = [text for row in found.rows() for text in row]
    for text in (cases.NASTY, f"mfac{cases.NASTY}", f"key {cases.NASTY}", f"score {cases.NASTY}"):
        assert text in rows
    assert page_of(cases.pruning(), title='"</title><i>').find("h1")[0]["text"] == '"</title><i>'


def test_a_run_that_is_not_finished_says_so():
    (note,) = page_of(cases.pruning("Half", finished=None)).find("p", **{"class": "open"})
    assert note["text"] == "“Half” is not finished: 8 cells are complete; what is missing is not shown."
    assert page("pruning").find("p", **{"class": "open"}) == []
    one_of_two = page_of(cases.pruning("Whole"), cases.pruning("Half", finished=None)).find("p", **{"class": "open"})
    assert [one["text"].split(" is")[0] for one in one_of_two] == ["“Half”"]


def test_a_run_without_cells_has_its_settings():
    found = page("empty")
    assert [one["text"] for one in found.find("p", **{"class": "lede"})] == ["No cell is complete yet."]
    assert found.find("figure") == []
    assert ["damping", "1e-05"] in found.rows()


def test_missing_values_leave_a_gap_and_a_dash():
    found = page("holes")
    (line,) = [
        one for one in found.figure("prune-loss") if one.get("class") == "line" and "details" not in one["inside"]
    ][:1]
    assert line["d"].count("M") == 2, "one piece on either side of the gap"
    assert [row for row in found.rows() if row[:2] == ["mfac", f"80{SPACE}%"] and row[3:4] == ["–"]]
    assert [f"mfac at 95{SPACE}%", "1", "11.88", "–", "–"] in found.rows()
    assert [row for row in found.rows() if row[:2] == ["magnitude", f"50{SPACE}%"]], (
        "asked for nothing: what was reached"
    )


def test_losses_that_are_all_missing_have_no_plot():
    run = cases.training(seeds=1)
    for cell in run["cells"]:
        cell |= {"losses": [None] * 200, "evaluations": []}
    found = page_of(run)
    assert [one["id"] for one in found.find("figure")] == ["train-time", "train-memory"]
    assert "No evaluations were made." in found.find("section", id="evaluations")[0]["text"]


def test_runs_are_merged_and_labels_that_clash_get_the_title():
    found = page_of(cases.pruning("A"), cases.pruning("B", labels=("mfac",)), cases.training(seeds=1))
    assert found.find("h1")[0]["text"] == "Comparison of 3 runs"
    legend = [one["text"] for one in found.figure("prune-loss") if one["tag"] == "li"]
    assert legend == ["mfac · A", "magnitude", "mfac · B", "dense"]
    assert "training-loss-step" in found.ids()
    assert ["", "A", "B", "Training on digits"] in found.rows()
    assert ["num_grads", "64", "64", "64"] in found.rows()


def test_runs_with_the_same_title_are_numbered():
    found = page_of(cases.pruning("A", labels=("mfac",)), cases.pruning("A", labels=("mfac",)))
    legend = [one["text"] for one in found.figure("prune-loss") if one["tag"] == "li"]
    assert legend == ["mfac (1)", "mfac (2)", "dense"]


def test_dense_models_that_differ_have_a_line_each():
    other = cases.pruning("B", dense={"loss": 0.5, "measure": 0.5})
    legend = [one["text"] for one in page_of(cases.pruning("A"), other).figure("prune-loss") if one["tag"] == "li"]
    assert legend[-2:] == ["dense · A", "dense · B"]


def test_measures_that_differ_have_a_plot_each():
    other = cases.pruning("B")
    other["task"] = other["task"] | {"measure": "correlation"}
    found = page_of(cases.pruning("A"), other)
    assert names_of_axes(found.figure("prune-measure-0"))[0] == "accuracy (%)"
    assert names_of_axes(found.figure("prune-measure-1"))[0] == "correlation"
    assert len(found.find("p", **{"class": "lede"})) == 2

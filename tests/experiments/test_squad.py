"""SQuAD 2.0: the reader, windows and targets, predictions, the official measures, and the recipe that trains on it."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from experiments.datasets import squad
from experiments.recipe import Request, Results
from experiments.recipes import bert

CONTEXT = (
    "  The Rhine rises in the Alps and flows north to Basel, Mainz and Cologne. In 1817 the engineer Tulla began to "
    "straighten it; the work took sixty years, and the river became shorter by eighty kilometres."
)
QUESTIONS = [
    ("Where does the Rhine rise?", "in the Alps"),
    ("Who straightened it?", "Tulla"),
    ("Which city comes after Basel?", "Mainz"),
    ("Who drained the Alps?", None),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def question(text, answer, key="q", context=CONTEXT):
    return squad.Question(key, text, context, () if answer is None else ((answer, context.index(answer)),))


def entry(key, text, answer):
    answers = [] if answer is None else [{"text": answer, "answer_start": CONTEXT.index(answer)}]
    return {"id": key, "question": text, "answers": answers, "is_impossible": answer is None}


def published(copies=1):
    """As the public files have it."""
    qas = [entry(f"{i}.{copy}", *pair) for copy in range(copies) for i, pair in enumerate(QUESTIONS)]
    return {"version": "v2.0", "data": [{"title": "Rhine", "paragraphs": [{"context": CONTEXT, "qas": qas}]}]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with SQuAD and a vocabulary, in which one word is cut in two."""
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    for name in ("squad", "minilm-l3"):
        (tmp_path / name).mkdir()
    for split, name in squad.FILES.items():
        (tmp_path / "squad" / name).write_text(json.dumps(published(3 if split == "train" else 1)))
    text = " ".join([CONTEXT, *(text for text, _ in QUESTIONS)]).lower()
    words = sorted({*re.findall(r"\w+|[^\w\s]", text), "flow", "##s"} - {"flows"})
    (tmp_path / "minilm-l3" / "vocab.txt").write_text("\n".join([*SPECIAL, *words]) + "\n")
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    pytest.importorskip("transformers", reason="transformers is not installed")
    return bert.tokenizer()


def tiny_config(tokenizer):
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def test_questions_are_read_with_their_contexts_and_answers(folder):
    read = squad.load_squad("dev")
    assert [(q.text, q.answers[0][0] if q.answers else None) for q in read] == QUESTIONS
    assert all(q.context == CONTEXT for q in read)
    assert len(squad.load_squad("train")) == 12


def test_other_splits_and_missing_files_are_refused(folder):
    with pytest.raises(ValueError, match=r'"train" or "dev" .*not .test'):
        squad.load_squad("test")
    (folder / "squad" / "dev-v2.0.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev-v2.0.json is not there; put it there by hand"):
        squad.load_squad("dev")


@pytest.mark.parametrize("text", ['{"data": [', '["v2.0"]', '{"data": [{"paragraphs": [{"qas": [{}]}]}]}'])
def test_files_that_are_not_as_published_are_refused(folder, text):
    (folder / "squad" / "dev-v2.0.json").write_text(text)
    with pytest.raises(ValueError, match=r"dev-v2.0.json is not as published .*download it again"):
        squad.load_squad("dev")


def test_gold_tokens_are_the_answer_where_a_window_has_it(tokenizer):
    for text, answer in QUESTIONS[:3]:
        windows = squad.cut_windows([question(text, answer)], tokenizer, 24, 6)
        targets = [window.target() for window in windows]
        assert len(windows) > 2
        found = [window.text(*target) for window, target in zip(windows, targets, strict=True) if target != (0, 0)]
        assert found
        assert set(found) == {answer}
        assert (0, 0) in targets


def test_part_of_a_token_is_the_whole_token(tokenizer):
    [window] = squad.cut_windows([question("When?", "7")], tokenizer)
    assert window.text(*window.target()) == "1817"


def test_an_answer_of_pieces_of_a_word(tokenizer):
    [window] = squad.cut_windows([question("How?", "flows north")], tokenizer)
    first, last = window.target()
    assert last - first == 2
    assert window.text(first, last) == "flows north"


def test_unanswerable_questions_point_at_the_first_token(tokenizer):
    windows = squad.cut_windows([question(*QUESTIONS[3])], tokenizer, 24, 6)
    batch = squad.collate(windows)
    assert batch["start_positions"].tolist() == batch["end_positions"].tolist() == [0] * len(windows)


def test_batches_are_drawn_anew_and_resume_by_their_generator(tokenizer):
    windows = squad.cut_windows(squad.load_squad("train"), tokenizer)
    batches = squad.WindowBatches(windows, 5, seed=1)
    state = batches.generator.get_state()
    first, second = ([batch["input_ids"] for batch in batches] for _ in range(2))
    assert len(first) == len(batches) == 2
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))
    batches.generator.set_state(state)
    assert all(torch.equal(a, batch["input_ids"]) for a, batch in zip(first, batches, strict=True))


class Scores(nn.Module):
    """Scores by token: {token: (as a start, as an end)}; all others get -1, and [CLS] what `null` says of a row."""

    def __init__(self, tokenizer, scores, null):
        super().__init__()
        self.ids = {tokenizer.convert_tokens_to_ids(token): pair for token, pair in scores.items()}
        self.null = null

    def forward(self, input_ids, **batch):
        starts, ends = (torch.full(input_ids.shape, -1.0) for _ in range(2))
        for token, (start, end) in self.ids.items():
            starts[input_ids == token], ends[input_ids == token] = start, end
        starts[:, 0] = torch.tensor([self.null(row.tolist()) for row in input_ids])
        ends[:, 0] = 0.0
        return SimpleNamespace(start_logits=starts, end_logits=ends)


def answered(tokenizer, scores, null, **limits):
    windows = squad.cut_windows([question("Which city?", "Mainz"), question("Who?", None, "r")], tokenizer, 20, 4)
    assert len(windows) > 4
    return squad.predict(Scores(tokenizer, scores, null), windows, 3, **limits)["q"]


def test_the_best_answer_of_all_windows_is_taken(tokenizer):
    scores = {"basel": (2.0, 2.0), "tulla": (3.0, 3.0), "city": (50.0, 50.0)}  # the last is in the question only
    assert answered(tokenizer, scores, lambda row: 5.0) == "Tulla"
    assert answered(tokenizer, scores, lambda row: 6.5) == ""


def test_no_answer_has_the_lowest_score_of_all_windows(tokenizer):
    mainz = tokenizer.convert_tokens_to_ids("mainz")
    scores = {"mainz": (2.0, 2.0)}
    assert answered(tokenizer, scores, lambda row: 3.0 if mainz in row else 9.0) == "Mainz"
    assert answered(tokenizer, scores, lambda row: 5.0 if mainz in row else 9.0) == ""


def test_answers_go_forward_and_are_short_enough(tokenizer):
    scores = {"basel": (1.0, 9.0), "mainz": (9.0, 1.0), "cologne": (0.0, 5.0)}
    assert answered(tokenizer, scores, lambda row: 0.0) == "Mainz and Cologne"
    assert answered(tokenizer, scores, lambda row: 0.0, longest=2) in ("Basel", "Mainz")
    assert answered(tokenizer, scores, lambda row: 0.0, best=1) == ""  # from Mainz back to Basel is no answer


def test_words_are_compared_without_case_articles_and_punctuation():
    assert squad.normalise(" The  Rhine's\tan A-river, theatre!") == ["rhines", "ariver", "theatre"]
    assert squad.overlap_f1([], []) == 1.0
    assert squad.overlap_f1(["rhine"], []) == 0.0
    assert squad.overlap_f1(["a", "a", "b"], ["a", "b", "b", "c"]) == pytest.approx(2 * 2 / 7)


@pytest.mark.parametrize(
    ("answers", "guess", "exact", "f1"),
    [
        (("the Alps", "in the Alps"), "The Alps.", 100, 100),
        (("north to Basel", "Cologne"), "to Basel", 0, 80),
        (("sixty years",), "", 0, 0),
        ((), "", 100, 100),
        ((), "Basel", 0, 0),
        (("the",), "", 100, 100),
    ],
)
def test_measures_by_hand(answers, guess, exact, f1):
    asked = squad.Question("q", "?", CONTEXT, tuple((text, 0) for text in answers))
    assert squad.score([asked], {"q": guess}) == {"exact": exact, "f1": pytest.approx(f1)}


def test_a_model_that_knows_the_questions_by_heart_is_right(tokenizer):
    from transformers import BertForQuestionAnswering

    windows = squad.cut_windows(squad.load_squad("dev")[1:], tokenizer, 40, 10)
    model, batch = BertForQuestionAnswering(tiny_config(tokenizer)), squad.collate(windows)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert squad.measured(model.eval(), windows) == {"exact": 100.0, "f1": 100.0}


@pytest.fixture
def request_in_full(folder, tokenizer, monkeypatch):
    """BERT-tiny on SQuADv2 in full, but for its checkpoint, the window, and the number of runs."""
    from transformers import BertModel

    BertModel(tiny_config(tokenizer)).save_pretrained(folder / "berts" / "tiny")
    monkeypatch.setitem(bert.SIZES, "full", replace(bert.SIZES["full"], seeds=1, rates=1))
    monkeypatch.setattr(bert, "file_of", lambda key: folder / "runs" / key)
    return Request("full", folder / "results", "BERT-tiny, squad2", checkpoint=folder / "berts")


def test_the_recipe_trains_both_optimizers_and_is_not_run_twice(request_in_full, monkeypatch, capsys):
    bert.run(request_in_full)
    cells = Results("bert", request_in_full).cells
    assert set(cells["before, BERT-tiny, squad2"]) >= {"exact", "f1"}
    for optimizer, lr in (("Adam", 3e-5), ("M-FAC", 0.1)):
        cell = cells[f"run, BERT-tiny, squad2, {optimizer}, seed 1"]
        assert cell["finished"]
        assert (cell["lr"], len(cell["losses"])) == (lr, 2)  # two passes of one batch of twelve
        assert 0 <= cell["tests"][-1]["exact"] <= cell["tests"][-1]["f1"] <= 100
    assert cell["window"] == 2
    capsys.readouterr()
    bert.run(request_in_full)
    assert " ..." not in capsys.readouterr().out
    monkeypatch.setattr(bert.drawing, "bars", lambda path, groups, y, title: (groups, title))
    groups, title = bert.plot(request_in_full)
    assert {row: set(part) for row, part in groups.items()} == {"BERT-tiny\nsquad2": {"Adam", "M-FAC"}}
    assert title.startswith("GLUE and SQuADv2")


def test_an_interrupted_run_goes_on_after_its_last_pass(request_in_full, capsys):
    [task] = bert.squad_tasks(request_in_full)
    make_model = bert.networks(request_in_full)["BERT-tiny"]

    def interrupt(model):
        raise KeyboardInterrupt

    def tuned(key, task):
        return bert.tuned(key, 0.1, "M-FAC", task, 1, make_model, bert.SIZES["full"], None)

    with pytest.raises(KeyboardInterrupt):
        tuned("stopped", replace(task, measure=interrupt))
    resumed, whole = tuned("stopped", task), tuned("whole", task)
    assert "resumed at step 1 of 2" in capsys.readouterr().out
    assert (resumed["losses"], resumed["tests"]) == (whole["losses"], whole["tests"])


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [(True, r"squad2 is left out: .*train-v2.0.json is not there; put it there by hand"),
     (False, "squad2 is left out: it needs --checkpoint FOLDER")],
)  # fmt: skip
def test_without_its_files_squad_is_left_out_and_glue_goes_on(tmp_path, monkeypatch, capsys, checkpoint, reason):
    seen = []
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    monkeypatch.setattr(bert, "untrained", lambda make_model, task: {})
    monkeypatch.setattr(bert, "compete", lambda results, network, task, *rest: seen.append(task.name))
    bert.run(Request("full", tmp_path, checkpoint=tmp_path if checkpoint else None))
    assert len(re.findall(reason, capsys.readouterr().out)) == 1
    assert set(seen) == {"mrpc", "rte", "stsb", "sst2"}

"""SQuAD 2.0: questions on paragraphs of Wikipedia, some of which the paragraph does not answer.

The files train-v2.0.json and dev-v2.0.json, as published, belong into the folder `squad` of the data folder. A question
and a piece of its context make one row of tokens, a window; what a window does not answer points at [CLS].
"""

import json
import re
import reprlib
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.data import find

FILES = {"train": "train-v2.0.json", "dev": "dev-v2.0.json"}
LONGEST, OVERLAP = 384, 128  # tokens of a window, and those that it shares with the next: Hugging Face's example
BEST, LONGEST_ANSWER = 20, 30  # starts and ends of a window that are tried, and tokens of an answer: the same example

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Question:
    """With its context and the answers that count as right, each with its first character; none: unanswerable."""

    key: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Passage:
    """A context in tokens, each of which stands for the characters starts[i] to ends[i]."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    def tokens_of(self, first: int, end: int) -> tuple[int, int] | None:
        """The first and the last token with any of the characters from `first` up to `end`."""
        tokens = bisect_right(self.ends, first), bisect_left(self.starts, end) - 1
        return tokens if tokens[0] <= tokens[1] else None


@dataclass(frozen=True)
class Window:
    """[CLS] question [SEP] tokens `first` to `end` of the passage [SEP].

    The row is put together when it is needed, so that all questions on a passage share its tokens.
    """

    question: Question
    head: list[int]  # up to the first [SEP]
    passage: Passage
    first: int
    end: int
    answer: tuple[int, int] | None  # tokens of the passage

    def ids(self) -> list[int]:
        return [*self.head, *self.passage.ids[self.first : self.end], self.head[-1]]

    def target(self) -> tuple[int, int]:
        """The row's first and last token of the answer; [CLS] where the whole of it is not in here."""
        if self.answer is None or self.answer[0] < self.first or self.answer[1] >= self.end:
            return 0, 0
        shift = len(self.head) - self.first
        return self.answer[0] + shift, self.answer[1] + shift

    def text(self, start: int, last: int) -> str:
        """What the context has from one token of the row to another."""
        shift = self.first - len(self.head)
        return self.passage.text[self.passage.starts[start + shift] : self.passage.ends[last + shift]]


def find_files() -> None:
    """Raises FileNotFoundError where one of the files is not in the data folder."""
    for name in FILES.values():
        find("squad", name)


def load_squad(split: str) -> list[Question]:
    """The questions of "train" or "dev".

    Raises:
        FileNotFoundError: the file is not in the data folder.
        ValueError: another split, or a file that is not as it was published.
    """
    if split not in FILES:
        raise ValueError(f'split must be "train" or "dev" (the test answers are not public), not {split!r}')
    path = find("squad", FILES[split])
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON ({error}); is the file whole? Fetch it again") from None
    questions = [
        question
        for article, place in _items(whole, "data", f"{path}: ")
        for paragraph, place in _items(article, "paragraphs", place)
        for question in _questions(paragraph, place)
    ]
    if not questions:
        raise ValueError(f"{path} must have questions, and has none; fetch {FILES[split]} again")
    return questions


def _questions(paragraph: Any, place: str) -> Iterator[Question]:
    context = _field(paragraph, "context", str, place)
    for entry, where in _items(paragraph, "qas", place):
        answers = []
        for answer, spot in _items(entry, "answers", where):
            text, first = _field(answer, "text", str, spot), _field(answer, "answer_start", int, spot)
            if first < 0 or not context.startswith(text, first):
                raise ValueError(
                    f"{spot}text must be what the context has from character {first} (answer_start), "
                    f"not {reprlib.repr(text)}; was the context changed? Fetch the file again"
                )
            answers.append((text, first))
        yield Question(_field(entry, "id", str, where), _field(entry, "question", str, where), context, tuple(answers))


def _field(node: Any, name: str, kind: type, place: str) -> Any:
    value = node.get(name) if isinstance(node, dict) else None
    if not isinstance(value, kind):
        raise ValueError(
            f"{place}{name} must be of type {kind.__name__} as in SQuAD 2.0, not {reprlib.repr(value)}; "
            "fetch the file again"
        )
    return value


def _items(node: Any, name: str, place: str) -> Iterator[tuple[Any, str]]:
    """Of a list: each with its place in the file, for messages."""
    for i, item in enumerate(_field(node, name, list, place)):
        yield item, f"{place}{name}[{i}]."


def cut_windows(
    questions: list[Question], tokenizer: Any, longest: int = LONGEST, overlap: int = OVERLAP
) -> list[Window]:
    """All windows of all questions, in their order; of several answers the first is the one to learn.

    Args:
        questions: of `load_squad`.
        tokenizer: BERT's, as Hugging Face has it, with offsets.
        longest: tokens of a window.
        overlap: tokens of a context that a window shares with the next.

    Raises:
        ValueError: a question that leaves too little room for its context.
    """
    passages = _passages(list({question.context: None for question in questions}), tokenizer)
    heads = tokenizer([question.text for question in questions])["input_ids"]
    windows = []
    for question, head in zip(questions, heads, strict=True):
        passage, room = passages[question.context], longest - len(head) - 1
        if room <= overlap:
            raise ValueError(
                f"question {question.key} leaves {room} of {longest} tokens to its context, which must be more than "
                f"the overlap of {overlap}; take longer windows or a smaller overlap"
            )
        text, first = question.answers[0] if question.answers else ("", 0)
        answer = passage.tokens_of(first, first + len(text))
        for start in range(0, max(1, len(passage.ids) - overlap), room - overlap):
            end = min(start + room, len(passage.ids))
            windows.append(Window(question, head, passage, start, end, answer))
    return windows


def _passages(contexts: list[str], tokenizer: Any) -> dict[str, Passage]:
    """Each context once, however many questions there are on it."""
    encoded = tokenizer(contexts, add_special_tokens=False, return_offsets_mapping=True)
    return {
        text: Passage(text, ids, [start for start, _ in offsets], [end for _, end in offsets])
        for text, ids, offsets in zip(contexts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    }


def collate(windows: list[Window]) -> Batch:
    """As `BertForQuestionAnswering` takes them, padded to the longest."""
    rows = [window.ids() for window in windows]
    ids, types, mask = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64) for _ in range(3))  # 0 is [PAD]
    for i, (window, row) in enumerate(zip(windows, rows, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        types[i, len(window.head) : len(row)] = 1
        mask[i, : len(row)] = 1
    starts, ends = torch.tensor([window.target() for window in windows]).T
    return {
        "input_ids": ids, "token_type_ids": types, "attention_mask": mask, "start_positions": starts,
        "end_positions": ends,
    }  # fmt: skip


class WindowBatches:
    """Batches for training; the order of a pass is drawn when it begins, and a smaller last batch is left out.

    Args:
        windows: of `cut_windows`.
        batch_size: of every batch.
        seed: of the order.
    """

    def __init__(self, windows: list[Window], batch_size: int, seed: int):
        self.windows, self.batch_size = windows, batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.windows) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.windows), generator=self.generator).tolist()
        for i in range(len(self)):
            yield collate([self.windows[k] for k in order[i * self.batch_size : (i + 1) * self.batch_size]])


@torch.no_grad()
def predict(
    model: nn.Module, windows: list[Window], batch_size: int = 32, best: int = BEST, longest: int = LONGEST_ANSWER
) -> dict[str, str]:
    """{question: the best answer in any of its windows, or "" where the lowest score of [CLS] is higher}."""
    spans: dict[str, tuple[float, str]] = {}
    nulls: dict[str, float] = {}
    for i in range(0, len(windows), batch_size):
        chosen = windows[i : i + batch_size]
        output = model(**collate(chosen))
        for window, starts, ends in zip(chosen, output.start_logits, output.end_logits, strict=True):
            key, null = window.question.key, float(starts[0] + ends[0])
            nulls[key] = min(nulls.get(key, null), null)
            found = best_span(window, starts, ends, best, longest)
            spans[key] = max(spans.get(key, found), found, key=lambda span: span[0])
    return {key: text if score >= nulls[key] else "" for key, (score, text) in spans.items()}


def best_span(window: Window, starts: Tensor, ends: Tensor, best: int, longest: int) -> tuple[float, str]:
    """(start + end, its text) of the highest sum among pairs of the best starts and ends in the window's context."""
    here = slice(len(window.head), len(window.head) + window.end - window.first)
    start, end = (scores[here].topk(min(best, window.end - window.first)) for scores in (starts, ends))
    lengths = end.indices - start.indices[:, None] + 1
    sums = (start.values[:, None] + end.values).masked_fill((lengths < 1) | (lengths > longest), -torch.inf)
    if not sums.numel() or sums.max() == -torch.inf:
        return -torch.inf, ""
    row, column = divmod(int(sums.argmax()), sums.shape[1])
    text = window.text(here.start + int(start.indices[row]), here.start + int(end.indices[column]))
    return float(sums[row, column]), text


def measured(model: nn.Module, windows: list[Window]) -> dict[str, float]:
    """Exact match and F1 of a model in eval mode, in per cent."""
    questions = {window.question.key: window.question for window in windows}
    return score(list(questions.values()), predict(model, windows))


def score(questions: list[Question], predictions: dict[str, str]) -> dict[str, float]:
    """Means over all questions of the best match with any right answer, in per cent, as SQuAD's own script has them."""
    exact, f1 = 0.0, 0.0
    for question in questions:
        guess = normalise(predictions[question.key])
        # Without an answer, or with none but articles and punctuation, only the empty one is right.
        right = [words for text, _ in question.answers if (words := normalise(text))] or [[]]
        exact += max(guess == words for words in right)
        f1 += max(overlap_f1(guess, words) for words in right)
    return {"exact": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def normalise(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def overlap_f1(guess: list[str], right: list[str]) -> float:
    """2 common words / all words of both; of nothing and nothing it is 1."""
    if not guess and not right:
        return 1.0
    return 2 * (Counter(guess) & Counter(right)).total() / (len(guess) + len(right))

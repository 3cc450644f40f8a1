"""SQuAD 2.0: questions about paragraphs of Wikipedia, some of which the paragraph does not answer.

The published files train-v2.0.json and dev-v2.0.json belong in the folder `squad` of the data folder. A question and a
part of its context make one row of tokens, a window; a window without the answer points at [CLS].
"""

import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets.folder import find

FILES = {"train": "train-v2.0.json", "dev": "dev-v2.0.json"}
LONGEST, OVERLAP = 384, 128  # tokens of a window, and those it shares with the next, as in Hugging Face's example
BEST, LONGEST_ANSWER = 20, 30  # starts and ends that are tried, and tokens of an answer, likewise
ENCODED = 1000  # questions at once

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Question:
    """With its context and the correct answers, each with its first character; none: unanswerable."""

    key: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Window:
    """[CLS] question [SEP] part of the context [SEP]; `spans` [tokens, 2] are characters of the context, −1 outside."""

    question: Question
    ids: Tensor
    spans: Tensor

    @property
    def inside(self) -> Tensor:
        """Which tokens are of the context."""
        return self.spans[:, 0] >= 0

    def target(self) -> tuple[int, int]:
        """The first and last token of the answer; [CLS] if the window does not contain all of it."""
        if not self.question.answers:
            return 0, 0
        text, first = self.question.answers[0]
        end, context = first + len(text), self.spans[self.inside]
        places = (self.inside & (self.spans[:, 0] < end) & (self.spans[:, 1] > first)).nonzero()
        if not len(places) or context[0, 0] > first or context[-1, 1] < end:
            return 0, 0
        return int(places[0]), int(places[-1])

    def text(self, start: int, last: int) -> str:
        """The context from one token to another."""
        return self.question.context[int(self.spans[start, 0]) : int(self.spans[last, 1])]


def find_files() -> None:
    """Raises FileNotFoundError if one of the files is missing."""
    for name in FILES.values():
        find(None, "squad", name)


def load_squad(split: str) -> list[Question]:
    """The questions of "train" or "dev"."""
    if split not in FILES:
        raise ValueError(f'split must be "train" or "dev" (the test answers are not public), not {split!r}')
    path = find(None, "squad", FILES[split])
    try:
        return [
            Question(entry["id"], entry["question"], paragraph["context"],
                     tuple((answer["text"], answer["answer_start"]) for answer in entry["answers"]))
            for article in json.loads(path.read_text(encoding="utf-8"))["data"]
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not as published ({error!r}); download it again") from None


def cut_windows(
    questions: list[Question], tokenizer: Any, longest: int = LONGEST, overlap: int = OVERLAP
) -> list[Window]:
    """All windows of all questions, in order, of at most `longest` tokens; two in a row share `overlap`."""
    windows = []
    for k in range(0, len(questions), ENCODED):
        part = questions[k : k + ENCODED]
        encoded = tokenizer(
            [question.text for question in part], [question.context for question in part], truncation="only_second",
            max_length=longest, stride=overlap, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        for i, number in enumerate(encoded["overflow_to_sample_mapping"]):
            offsets = zip(encoded["offset_mapping"][i], encoded.sequence_ids(i), strict=True)
            spans = torch.tensor([span if sentence == 1 else (-1, -1) for span, sentence in offsets])
            windows.append(Window(part[number], torch.tensor(encoded["input_ids"][i]), spans.int()))
    return windows


def collate(windows: list[Window]) -> Batch:
    """As `BertForQuestionAnswering` takes them, padded to the longest."""
    width = max(len(window.ids) for window in windows)
    ids, types, mask = (torch.zeros(len(windows), width, dtype=torch.int64) for _ in range(3))  # 0 is [PAD]
    for i, window in enumerate(windows):
        length = len(window.ids)
        ids[i, :length], mask[i, :length] = window.ids, 1
        types[i, int(window.inside.long().argmax()) : length] = 1
    starts, ends = torch.tensor([window.target() for window in windows]).T
    return {
        "input_ids": ids, "token_type_ids": types, "attention_mask": mask, "start_positions": starts,
        "end_positions": ends,
    }  # fmt: skip


class WindowBatches:
    """Shuffled batches; a smaller last one is left out."""

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
    """{question: the best answer in any of its windows, or "" if the lowest score of [CLS] is higher}."""
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
    """(start + end, its text) of the highest sum among pairs of the best starts and ends in the context."""
    places = window.inside.nonzero().flatten()
    start, end = (scores[places].topk(min(best, len(places))) for scores in (starts, ends))
    lengths = end.indices - start.indices[:, None] + 1
    sums = (start.values[:, None] + end.values).masked_fill((lengths < 1) | (lengths > longest), -torch.inf)
    if not sums.numel() or sums.max() == -torch.inf:
        return -torch.inf, ""
    row, column = divmod(int(sums.argmax()), sums.shape[1])
    text = window.text(int(places[start.indices[row]]), int(places[end.indices[column]]))
    return float(sums[row, column]), text


def measured(model: nn.Module, windows: list[Window]) -> dict[str, float]:
    """Exact match and F1 of a model in eval mode, in per cent."""
    questions = {window.question.key: window.question for window in windows}
    return score(list(questions.values()), predict(model, windows))


def score(questions: list[Question], predictions: dict[str, str]) -> dict[str, float]:
    """Means over all questions of the best match with any correct answer, in per cent, as in SQuAD's own script."""
    exact, f1 = 0.0, 0.0
    for question in questions:
        guess = normalise(predictions[question.key])
        # Without an answer, or with only articles and punctuation, only the empty guess is correct.
        right = [words for text, _ in question.answers if (words := normalise(text))] or [[]]
        exact += max(guess == words for words in right)
        f1 += max(overlap_f1(guess, words) for words in right)
    return {"exact": 100 * exact / len(questions), "f1": 100 * f1 / len(questions)}


def normalise(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def overlap_f1(guess: list[str], right: list[str]) -> float:
    if not guess and not right:
        return 1.0
    return 2 * (Counter(guess) & Counter(right)).total() / (len(guess) + len(right))

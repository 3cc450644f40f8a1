"""MiniLM on GLUE's STS-B: how similar two sentences are, by the cosine of their embeddings.

The model comes trained. The measure is Spearman's rank correlation on the development set, the loss the squared error
of the cosine.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from experiments.correlations import spearman
from experiments.datasets.folder import data_folder
from experiments.datasets.sentences import load_glue
from experiments.models.minilm import minilm_encoder, tokenizer
from mfac.gradients import criterion_loss

LARGEST_SCORE = 5.0
Sentence = list[int]
Pairs = tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]

measure = "spearman"
loss = criterion_loss(nn.MSELoss())
optimizer = partial(torch.optim.AdamW, lr=2e-5)


def model() -> "SentencePairs":
    return SentencePairs(minilm_encoder()).eval()


def train_batches() -> "PairBatches":
    return pairs("train", shuffle=True)


def eval_batches() -> "PairBatches":
    return pairs("dev")


def evaluate(model: nn.Module) -> float:
    return correlation(model, eval_batches())


class SentencePairs(nn.Module):
    """The cosine of two sentences."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, first: Tensor, first_mask: Tensor, second: Tensor, second_mask: Tensor) -> Tensor:
        return F.cosine_similarity(embed(self.encoder, first, first_mask), embed(self.encoder, second, second_mask))


def embed(encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The mean of the encoder's outputs: one vector per sentence."""
    hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


class PairBatches:
    """Batches ((ids, mask, ids, mask), scores from 0 to 1), each side padded to its longest sentence.

    The order of a shuffled pass is drawn from torch's global random state; a smaller last batch is left out.
    """

    def __init__(self, first: list[Sentence], second: list[Sentence], scores: Tensor, *, size: int, shuffle: bool):
        self.first, self.second, self.scores, self.size, self.shuffle = first, second, scores, size, shuffle

    def __len__(self) -> int:
        whole, rest = divmod(len(self.scores), self.size)
        return whole + bool(rest and not self.shuffle)

    def __iter__(self) -> Iterator[Pairs]:
        count = len(self.scores)
        order = torch.randperm(count) if self.shuffle else torch.arange(count)
        for chosen in order.split(self.size)[: len(self)]:
            sides = [_padded([side[k] for k in chosen.tolist()]) for side in (self.first, self.second)]
            yield (*sides[0], *sides[1]), self.scores[chosen]


def pairs(
    split: str, size: int = 16, *, shuffle: bool = False, length: int = 64, limit: int | None = None
) -> PairBatches:
    """Batches of the first `limit` pairs, sentences cut to `length` tokens."""
    return PairBatches(*(part[:limit] for part in _encode(split, length, data_folder())), size=size, shuffle=shuffle)


@torch.no_grad()
def correlation(model: nn.Module, batches: PairBatches) -> float:
    """Spearman's rank correlation of cosines and scores, in eval mode."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    found = [(model(*(part.to(device) for part in pair)), scores.to(device)) for pair, scores in batches]
    model.train(training)
    cosines, scores = zip(*found, strict=True)
    return spearman(torch.cat(cosines), torch.cat(scores))


def _padded(sentences: list[Sentence]) -> tuple[Tensor, Tensor]:
    ids = pad_sequence([torch.tensor(tokens) for tokens in sentences], batch_first=True)  # 0 is [PAD]
    return ids, pad_sequence([torch.ones(len(tokens), dtype=torch.int64) for tokens in sentences], batch_first=True)


@cache
def _encode(split: str, length: int, folder: Path) -> tuple[list[Sentence], list[Sentence], Tensor]:
    """Once per folder: `folder` is only part of the cache's key."""
    examples = load_glue("stsb", split)
    cut = partial(tokenizer(), truncation=True, max_length=length)
    first = cut([example.first for example in examples])["input_ids"]
    second = cut([str(example.second) for example in examples])["input_ids"]
    return first, second, torch.tensor([example.label for example in examples]) / LARGEST_SCORE

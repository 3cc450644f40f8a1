"""A small pretrained BERT (paraphrase-MiniLM-L3-v2) as it is: sentences, their cosine, and how it agrees with STS-B."""

from typing import Any

import torch
from torch import Tensor

from experiments import correlations
from experiments.datasets.sentences import Example, load_glue
from experiments.models.minilm import minilm_encoder, tokenizer
from experiments.tasks.glue_stsb import SentencePairs

LENGTH = 32  # tokens of a sentence; longer ones are cut


def load() -> SentencePairs:
    """The checkpoint, in float32."""
    return SentencePairs(minilm_encoder().requires_grad_(True)).eval()


def pairs(split: str, batch_size: int, limit: int | None = None) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """STS-B in batches ((ids, mask, ids, mask), scores from 0 to 1)."""
    rows = load_glue("stsb", split)[:limit]
    cutter = tokenizer()
    return [_encode(cutter, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]


@torch.no_grad()
def spearman(model: SentencePairs, batches: list[tuple[tuple[Tensor, ...], Tensor]]) -> float:
    """The rank correlation of cosines and scores."""
    cosines = torch.cat([model(*inputs) for inputs, _ in batches])
    return correlations.spearman(cosines, torch.cat([scores for _, scores in batches]))


def _encode(tokenizer: Any, rows: list[Example]) -> tuple[tuple[Tensor, ...], Tensor]:
    encoded = []
    for side in ([row.first for row in rows], [row.second for row in rows]):
        tokens = tokenizer(side, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        encoded += [tokens["input_ids"], tokens["attention_mask"]]
    return tuple(encoded), torch.tensor([row.label / 5 for row in rows])

"""A small pretrained BERT (paraphrase-MiniLM-L3-v2) as it is: sentences, their cosine, and how it agrees with STS-B."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.data import find
from mfac.datasets.sentences import Example, load_glue

LENGTH = 32  # tokens of a sentence; longer ones are cut


class SentencePairs(nn.Module):
    """The cosine of two sentences: mean-pooled outputs of the encoder."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    def forward(self, first: Tensor, first_mask: Tensor, second: Tensor, second_mask: Tensor) -> Tensor:
        return F.cosine_similarity(self.embed(first, first_mask), self.embed(second, second_mask))


def load() -> SentencePairs:
    """The checkpoint, in float32."""
    from transformers import BertConfig, BertModel

    folder = find("minilm-l3")
    fields = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in fields.items() if key not in ("model_type", "pooler", "stored_dtype")}
    encoder = BertModel(BertConfig(**kept), add_pooling_layer=False)
    arrays = np.load(folder / "paraphrase-MiniLM-L3-v2.fp16.npz")
    state = {key: torch.from_numpy(arrays[key]).float() for key in arrays.files}
    missing, spare = encoder.load_state_dict(state, strict=False)
    lost = [key for key in (*missing, *spare) if "position_ids" not in key and "token_type_ids" not in key]
    if lost:
        raise ValueError(f"the checkpoint does not fit the model: {lost}")
    return SentencePairs(encoder).eval()


def pairs(split: str, batch_size: int, limit: int | None = None) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """STS-B in batches ((ids, mask, ids, mask), scores from 0 to 1)."""
    rows = load_glue("stsb", split)[:limit]
    tokenizer = _tokenizer()
    return [_encode(tokenizer, rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]


@torch.no_grad()
def spearman(model: SentencePairs, batches: list[tuple[tuple[Tensor, ...], Tensor]]) -> float:
    """The rank correlation of cosines and scores."""
    cosines = torch.cat([model(*inputs) for inputs, _ in batches])
    scores = torch.cat([scores for _, scores in batches])
    return float(torch.corrcoef(torch.stack([_ranks(cosines), _ranks(scores)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Ranks, ties sharing their mean."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def _tokenizer() -> Any:
    from transformers import BertTokenizer

    return BertTokenizer(str(find("minilm-l3", "vocab.txt")), do_lower_case=True)


def _encode(tokenizer: Any, rows: list[Example]) -> tuple[tuple[Tensor, ...], Tensor]:
    encoded = []
    for side in ([row.first for row in rows], [row.second for row in rows]):
        tokens = tokenizer(side, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        encoded += [tokens["input_ids"], tokens["attention_mask"]]
    return tuple(encoded), torch.tensor([row.label / 5 for row in rows])

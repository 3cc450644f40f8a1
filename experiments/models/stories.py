"""Language models of 260,032 and 15,191,712 weights trained on TinyStories, and pieces of that text as their tokens."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.datasets.folder import find
from experiments.models.minilm import require_transformers

WEIGHTS = {"stories260K": "stories260K.npz", "stories15M": "stories15M.fp16.npz"}


def stories_model(name: str) -> nn.Module:
    transformers: Any = require_transformers()
    config = json.loads(find(None, name, f"{name}.config.json").read_text())
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    arrays = np.load(find(None, name, WEIGHTS[name]))
    state = {key: torch.from_numpy(arrays[key]).float() for key in arrays.files}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})  # tied
    return model.eval()


def story_pieces(name: str, split: str, length: int) -> Tensor:
    """The first tokens of every piece of "train" or "valid" that is one story of at least so many, [pieces, length]."""
    found = np.load(find(None, "tinystories", f"tinystories.{name}.npz"))
    tokens, starts = torch.from_numpy(found[split].astype(np.int64)), found[f"{split}_starts"].tolist()
    pieces = [
        tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True) if length <= b - a < 2 * length
    ]
    return torch.stack([piece[:length] for piece in pieces])


def story_batches(pieces: Tensor, size: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": part, "labels": part} for part in pieces.split(size)]


@torch.no_grad()
def perplexity(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """exp of the mean loss over batches of equal size."""
    return float(torch.stack([model(**batch).loss for batch in batches]).mean().exp())

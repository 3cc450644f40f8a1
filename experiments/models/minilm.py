"""A small pretrained BERT (paraphrase-MiniLM-L3-v2), from the files in the data folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.datasets.folder import MissingData, find
from mfac.app.tasks import TaskError

STORED_ONLY = ("model_type", "pooler", "stored_dtype", "architectures", "transformers_version", "_name_or_path")


def minilm_encoder() -> nn.Module:
    """As it was trained. Embeddings are frozen, 11.8 of 17.1 million weights: their gradients are nearly all zero."""
    transformers = require_transformers()
    folder = find("minilm-l3", "minilm-l3", "config.json").parent
    fields = json.loads((folder / "config.json").read_text())
    config = transformers.BertConfig(**{key: value for key, value in fields.items() if key not in STORED_ONLY})
    encoder: Any = transformers.BertModel(config, add_pooling_layer=False)
    missing, spare = encoder.load_state_dict(_read_weights(folder), strict=False)
    if lost := [*missing, *spare]:
        raise TaskError(f"the weights in {folder} do not fit its config.json: {', '.join(lost[:3])} ...")
    encoder.embeddings.requires_grad_(False)
    return encoder


def tokenizer() -> Any:
    return require_transformers().BertTokenizer(vocab=str(find("minilm-l3", "minilm-l3", "vocab.txt")))


def require_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise TaskError("the tasks of GLUE need transformers: pip install 'torch-mfac[transformers]'") from None
    return transformers


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """In float32: from Hugging Face's model.safetensors, or from an .npz of the same names."""
    packed = folder / "paraphrase-MiniLM-L3-v2.fp16.npz"
    if packed.exists():
        with np.load(packed) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    elif (folder / "model.safetensors").exists():
        from safetensors.torch import load_file

        tensors = {name.removeprefix("bert."): value for name, value in load_file(folder / "model.safetensors").items()}
    else:
        raise MissingData(
            f"{folder} has no weights; `python -m experiments.datasets minilm-l3` fetches model.safetensors, "
            "or put it there by hand"
        )
    left_out = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids")
    return {name: value.float() for name, value in tensors.items() if not name.startswith(left_out)}

"""BERT-tiny and BERT-mini (Turc et al., 2019): from a folder with their checkpoint, or built from their sizes."""

from pathlib import Path
from typing import Any

from torch import nn

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
}


def bert_config(name: str, labels: int = 2) -> Any:
    """The configuration of "tiny" or "mini", with the vocabulary of uncased BERT."""
    if name not in SIZES:
        raise ValueError(f"there is BERT-{' and BERT-'.join(SIZES)}, and no BERT-{name}")
    from transformers import BertConfig

    return BertConfig(**SIZES[name], num_labels=labels)


def bert_classifier(name: str, labels: int, checkpoint: Path | None = None) -> nn.Module:
    """BERT for sentences and pairs of them; without a checkpoint (a Hugging Face folder) it is not pretrained."""
    from transformers import BertForSequenceClassification

    return _build(BertForSequenceClassification, name, labels, checkpoint)


def bert_for_answers(name: str, checkpoint: Path | None = None) -> nn.Module:
    """BERT that scores every token as the first and as the last of the answer to a question."""
    from transformers import BertForQuestionAnswering

    return _build(BertForQuestionAnswering, name, 2, checkpoint)


def _build(kind: Any, name: str, labels: int, checkpoint: Path | None) -> nn.Module:
    if checkpoint is None:
        return kind(bert_config(name, labels))
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(
            f"{checkpoint} is no checkpoint of Hugging Face: it has no config.json; save one there, "
            f"for instance google/bert_uncased_L-{SIZES[name]['num_hidden_layers']}_H-{SIZES[name]['hidden_size']}"
            f"_A-{SIZES[name]['num_attention_heads']}"
        )
    return kind.from_pretrained(checkpoint, num_labels=labels)

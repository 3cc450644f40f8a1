"""BERT-tiny and BERT-mini (Turc et al., 2019): from a folder with their checkpoint, or built from their sizes."""

from pathlib import Path

from torch import nn

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
}


def bert_classifier(name: str, labels: int, checkpoint: Path | None = None) -> nn.Module:
    """A classifier of sentences and pairs; without a checkpoint (a Hugging Face folder) it is not pretrained."""
    from transformers import BertConfig, BertForSequenceClassification

    if checkpoint is None:  # the vocabulary is that of uncased BERT
        return BertForSequenceClassification(BertConfig(**SIZES[name], num_labels=labels))
    if not (checkpoint / "config.json").exists():
        layers, heads = SIZES[name]["num_hidden_layers"], SIZES[name]["num_attention_heads"]
        raise FileNotFoundError(
            f"{checkpoint} has no config.json of Hugging Face; save a checkpoint there, for instance "
            f"google/bert_uncased_L-{layers}_H-{SIZES[name]['hidden_size']}_A-{heads}"
        )
    return BertForSequenceClassification.from_pretrained(checkpoint, num_labels=labels)

"""BERT-tiny (Turc et al., 2019), not pretrained, as a classifier of sentences."""

from torch import nn


def bert_tiny(num_labels: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForSequenceClassification(BertConfig(**sizes, num_labels=num_labels))  # uncased BERT's vocabulary

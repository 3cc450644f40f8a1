"""BERT-tiny (Turc et al., 2019), not pretrained, for a task of GLUE with classes."""

from torch import nn

from experiments.datasets.sentences import COLUMNS


def bert_tiny(task: str) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForSequenceClassification(BertConfig(**sizes, num_labels=len(COLUMNS[task].classes)))

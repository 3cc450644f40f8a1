"""Correlations of what a model says with what is so."""

import torch
from torch import Tensor


def pearson(outputs: Tensor, labels: Tensor) -> float:
    """The correlation; 0 where all outputs are the same."""
    pairs = torch.stack([outputs.flatten().double(), labels.double()])
    return float(torch.corrcoef(pairs)[0, 1].nan_to_num())


def spearman(outputs: Tensor, labels: Tensor) -> float:
    """The correlation of ranks; 0 where all outputs are the same."""
    return pearson(_ranks(outputs.flatten()), _ranks(labels))


def _ranks(values: Tensor) -> Tensor:
    """Ranks, ties sharing their mean."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]

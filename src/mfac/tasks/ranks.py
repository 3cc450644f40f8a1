"""Rank correlation."""

import torch
from torch import Tensor


def spearman(outputs: Tensor, labels: Tensor) -> float:
    """The correlation of ranks; 0 where all outputs are the same."""
    ranks = torch.stack([_ranks(outputs.flatten()), _ranks(labels)])
    return float(torch.corrcoef(ranks)[0, 1].nan_to_num())


def _ranks(values: Tensor) -> Tensor:
    """Ranks, ties sharing their mean."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]

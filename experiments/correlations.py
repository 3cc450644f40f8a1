"""Correlations of a model's outputs with the labels; 0 where all outputs are the same."""

import torch
from scipy.stats import rankdata
from torch import Tensor


def pearson(outputs: Tensor, labels: Tensor) -> float:
    pairs = torch.stack([outputs.flatten().double(), labels.double()])
    return float(torch.corrcoef(pairs)[0, 1].nan_to_num())


def spearman(outputs: Tensor, labels: Tensor) -> float:
    return pearson(*(torch.from_numpy(rankdata(values.flatten().cpu())) for values in (outputs, labels)))

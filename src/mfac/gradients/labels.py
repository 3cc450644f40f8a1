"""Labels drawn from a model's own output, those of each sample from a seed of its own."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

Family = Literal["softmax", "sigmoid", "squared error"]


class Noise:
    """Random numbers for a batch of as many equal parts as there are seeds, each from its seed alone."""

    def __init__(self, seeds: Sequence[int]):
        self.seeds = seeds

    def uniform(self, like: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        return self._draw(torch.rand, like, torch.float64)

    def normal(self, like: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        return self._draw(torch.randn, like, like.dtype)

    def _draw(self, draw: Callable[..., Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
        seeds = self.seeds if len(like) % len(self.seeds) == 0 else self.seeds[:1]  # parts that cannot be told apart
        shape = (len(like) // len(seeds), *like.shape[1:])
        parts = [draw(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) for seed in seeds]
        return torch.cat(parts).to(like.device)


def draw_classes(logits: Float[Tensor, "n classes ..."], noise: Noise) -> Int[Tensor, "n ..."]:
    """One class from the softmax over dimension 1: the first up to which the probabilities add up to more than u."""
    sums = logits.detach().double().movedim(1, -1).softmax(-1).cumsum(-1)
    u = noise.uniform(sums[..., 0]) * sums[..., -1]
    return torch.searchsorted(sums, u.unsqueeze(-1), right=True).squeeze(-1).clamp_max(sums.shape[-1] - 1)


def draw_normal(mean: Float[Tensor, "n ..."], noise: Noise) -> Float[Tensor, "n ..."]:
    """(y - mean)² is the negative log-likelihood of a normal distribution of variance 1/2."""
    return mean.detach() + noise.normal(mean) * 0.5**0.5


def family(criterion: Any, fisher: str) -> Family:
    """The distribution whose negative log-likelihood the criterion is; ValueError if none is known."""
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion in (F.cross_entropy, F.nll_loss):
        return "softmax"  # the softmax of log-probabilities is the probabilities
    if isinstance(criterion, nn.BCEWithLogitsLoss) or criterion is F.binary_cross_entropy_with_logits:
        return "sigmoid"
    if isinstance(criterion, nn.MSELoss) or criterion is F.mse_loss:
        return "squared error"
    name = getattr(criterion, "__name__", type(criterion).__name__)
    known = "cross-entropy, NLL, binary cross-entropy with logits and squared error"
    way = "sample_fn(model, batch) -> labelled batch" if fisher == "sampled" else "output_fn(model, batch) -> logits"
    raise ValueError(f'fisher="{fisher}" knows {known}, not {name}; pass {way}')


def draw_targets(criterion: Any, output: Tensor, targets: Tensor, noise: Noise) -> Tensor:
    """Targets from the distribution of the criterion's family."""
    kind = family(criterion, "sampled")
    if kind == "sigmoid":
        return (noise.uniform(output) < output.detach().sigmoid()).to(targets.dtype)
    if kind == "squared error":
        return draw_normal(output, noise)
    drawn = draw_classes(output, noise)
    if targets.is_floating_point():
        return drawn
    return torch.where(targets == getattr(criterion, "ignore_index", -100), targets, drawn.to(targets.dtype))

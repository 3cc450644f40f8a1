"""Rows of the Gauss-Newton matrix: gradients of v·z, where z are the model's outputs and v is random, E[vvᵀ] = H.

H is the Hessian of the loss with respect to z, so the mean of g gᵀ is the Gauss-Newton matrix Jᵀ H J of the loss, with
its reduction and its weights. Labels decide only which outputs count, and how much.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn, OutputFn, family, ready_loss
from mfac.gradients.model_state import evaluation

# splitmix64: the increment, and the factors as signed numbers.
GOLDEN, FACTORS = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
GAUSS_NEWTON = 'fisher="gauss-newton"'
BITS = 32  # of each mixed number become signs


class GaussNewtonLoss:
    """v·z for pairs (batch, seeds) that `draw` makes of batches; its gradient is a row of the Gauss-Newton matrix.

    The signs of v depend on the seed alone, so that one backward pass gives all rows of a batch, by `vmap` or by hooks.
    """

    def __init__(self, loss_fn: LossFn, output_fn: OutputFn | None = None):
        self.ready = ready_loss(loss_fn, output_fn, GAUSS_NEWTON)
        if getattr(getattr(self.ready, "criterion", None), "reduction", "mean") == "none":
            raise ValueError(f'{GAUSS_NEWTON} needs a criterion with reduction="mean" or "sum", not "none"')
        self._parts: Any = None

    def draw(self, model: nn.Module, batch: Batch, seeds: Sequence[int]) -> tuple[Batch, Int[Tensor, "rows"]]:
        """(batch, one seed a row); the first batch also shows how the loss reads the model's outputs."""
        with torch.no_grad():
            self._parts = self._parts or self.ready.reading(model, batch, GAUSS_NEWTON)
        return batch, torch.tensor(seeds, device="cpu")

    def __call__(self, model: nn.Module, pair: tuple[Batch, Int[Tensor, "1"]]) -> Float[Tensor, ""]:
        batch, seeds = pair
        criterion, z, targets = self._parts(model, batch)
        return (output_seed(criterion, z, targets, random_signs(seeds[0], z)) * z).sum()


def has_output(loss_fn: LossFn, output_fn: OutputFn | None, model: nn.Module, batch: Batch) -> bool:
    """Whether Gauss-Newton rows can be had: whether the output and the Hessian of the loss are known for this batch."""
    try:
        with evaluation(model):
            GaussNewtonLoss(loss_fn, output_fn).draw(model, batch, [0])
    except ValueError:
        return False
    return True


def output_seed(criterion: Any, z: Tensor, targets: Tensor | None, signs: Tensor) -> Float[Tensor, "..."]:
    """v of the shape of z with E[vvᵀ] = H over random signs; the classes of a softmax are dimension 1.

    Softmax: √c (√p∘ε - p(√p·ε)); sigmoid: √(c p(1-p)) ε; squared error: √(2c) ε; c is the weight of a position.
    """
    kind, dim = family(criterion, GAUSS_NEWTON), min(1, z.ndim - 1)
    z = z.detach() if z.dtype.itemsize > 2 else z.detach().float()
    if kind == "squared error":
        return signs * (2 * criterion(torch.ones_like(z), torch.zeros_like(z)) / z.numel()).sqrt()
    if kind == "sigmoid":
        p = z.sigmoid()
        return signs * (_weights(criterion, torch.zeros_like(z), targets, math.log(2)) * p * (1 - p)).sqrt()
    p = z.softmax(dim)
    if targets is None:
        weights = torch.full_like(z.select(dim, 0), z.shape[dim] / z.numel())
    elif getattr(criterion, "weight", None) is None and not targets.is_floating_point():
        weights = (targets != getattr(criterion, "ignore_index", -100)).to(z.dtype)
        weights = weights / (weights.sum().clamp_min(1) if getattr(criterion, "reduction", "mean") == "mean" else 1)
    else:
        equal = torch.full_like(z, -math.log(z.shape[dim]))
        weights = _weights(criterion, equal, targets, math.log(z.shape[dim]))
    root = p.sqrt() * signs
    return weights.sqrt().unsqueeze(dim) * (root - p * root.sum(dim, keepdim=True))


def _weights(criterion: Any, equal: Tensor, targets: Any, unit: float) -> Tensor:
    """The weight of each position: its share of the loss where all classes are equally likely, in units of that loss.

    Cross-entropies are linear in their targets, and so are class weights, smoothing and positive weights in them.
    """
    each: Any = partial(criterion, reduction="none")
    if isinstance(criterion, nn.Module):
        each = copy.copy(criterion)
        each.reduction = "none"
    losses = each(equal, targets)
    return losses * (criterion(equal, targets) / losses.sum() / unit)


def random_signs(seed: Int[Tensor, ""], like: Tensor) -> Tensor:
    """±1 of the shape of `like`, from the seed alone, the same on every device and inside `vmap`."""
    count = like.numel()
    words = torch.arange(1, -(-count // BITS) + 1, device=like.device)
    mixed = _mix(_mix(seed.to(like.device)) + words * GOLDEN)
    bits = (mixed.unsqueeze(1) >> torch.arange(64 - BITS, 64, device=like.device)) & 1
    dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
    return 1 - 2 * bits.flatten()[:count].view(like.shape).to(dtype)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The output function of splitmix64; >> keeps the sign, so the bits that it brings in are masked."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))

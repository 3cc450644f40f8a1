"""Numbers in eight bits, with one scale a block: pure functions over tensors.

A scale keeps 16 bits of its mantissa, so that code times scale is exact in float32: what a row reads back as is one
number, whatever the arithmetic.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.nn import functional as F

LARGEST = 127
_SPARE_BITS = 0xFF  # of a float32 mantissa: 24 bits, less the 16 of a scale


def num_blocks(dim: int, block: int) -> int:
    """How many blocks of at most `block` numbers there are in `dim`."""
    return -(-dim // block)


def quantize(
    rows: Float[Tensor, "... d"], block: int, noise: Float[Tensor, "... d"] | None = None
) -> tuple[Int8[Tensor, "... d"], Float[Tensor, "... blocks"]]:
    """Codes and scales: |codes| ≤ 127, scale ≥ max|block|/127 by no more than 16 bits make it.

    Args:
        rows: numbers, which float32 must hold; where a block is not finite, its scale is not either.
        block: how many neighbours share a scale.
        noise: uniform in [0, 1): rounds up with the probability of the fraction; None: to the nearest.
    """
    rows = rows.float()
    d = rows.shape[-1]
    whole = F.pad(rows, (0, -d % block)).unflatten(-1, (-1, block))
    scales = _rounded_up(whole.abs().amax(-1) / LARGEST)
    codes = whole / torch.where(scales > 0, scales, 1.0)[..., None]
    codes = codes.flatten(-2)[..., :d]
    codes = codes.round_() if noise is None else codes.add_(noise).floor_()
    return codes.clamp_(-LARGEST, LARGEST).nan_to_num_(0.0).to(torch.int8), scales


def draws(dim: int, seed: int, number: int, device: torch.device | str = "cpu") -> Float[Tensor, " d"]:
    """Noise for row `number`: it depends on nothing else, so what is stopped goes on with the same draws."""
    generator = torch.Generator(device).manual_seed((seed << 32) + number)
    return torch.rand(dim, generator=generator, device=device)


def dequantize(codes: Int8[Tensor, "... d"], scales: Float[Tensor, "... blocks"], block: int) -> Float[Tensor, "... d"]:
    """Codes times scales, exact, in float32."""
    d = codes.shape[-1]
    return codes.float().mul_(scales.repeat_interleave(block, dim=-1)[..., :d])


def _rounded_up(scales: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The next numbers whose last eight bits are zero; NaN and infinity stay what they are."""
    return scales.contiguous().view(torch.int32).add(_SPARE_BITS).bitwise_and_(~_SPARE_BITS).view(torch.float32)

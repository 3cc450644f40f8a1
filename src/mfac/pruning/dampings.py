"""A damping chosen by the data: relative to the gradients' scale, and judged by gradients that were held out."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.columns import Ranks
from mfac.static import StaticInverseFisher

FRACTIONS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
HELD_OUT = 4  # every fourth row


def choose_damping(
    rows: Float[Tensor, "m d"],
    block_size: int | None,
    sizes: Sequence[int],
    fractions: Sequence[float] = FRACTIONS,
    ranks: Ranks | None = None,
) -> float:
    """The fraction of the mean diagonal of GᵀG/m that makes gradients it has not seen the most likely.

    F is built on three quarters of the rows. The others are taken for draws from a normal distribution of covariance
    F: the λ with the smallest log det F + mean gᵀF⁻¹g wins. Too small a λ finds directions impossible that do occur,
    too large a one drowns what the rows have to say.

    With several `ranks`, the rows are those of this rank's columns, and all choose the same.

    Raises:
        ValueError: fewer than four rows, or rows of zeros.
    """
    held = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    held[HELD_OUT - 1 :: HELD_OUT] = True
    ranks = Ranks() if ranks is None else ranks
    sums = torch.tensor([float(rows.double().square().sum()), rows.numel()], dtype=torch.float64, device=rows.device)
    squares, count = ranks.sum_(sums).tolist()
    scale = squares / count
    if scale == 0 or not bool(held.any()):
        raise ValueError(
            f'damping="auto" goes by the scale of the gradients and holds some of them out; {len(rows)} rows with a '
            f"mean square of {scale:g} do not allow that: give a number"
        )
    seen, judges = rows[~held], rows[held].T.contiguous()
    split = None if block_size is None else sizes
    operator = StaticInverseFisher(
        seen, max(fractions) * scale, block_size=block_size, sizes=split, process_group=ranks.group
    )
    unlikely = {}
    for fraction in sorted(fractions, reverse=True):
        operator.damping = fraction * scale
        unlikely[fraction * scale] = float(operator.quadratic_form(judges).double().mean() - operator.logdet())
    return min(unlikely, key=unlikely.__getitem__)

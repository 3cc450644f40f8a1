"""A damping chosen by the data: relative to the scale of the gradients, and judged by held-out gradients."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.pages import Reduce
from mfac.static import BlockOptions, build_blocks

FRACTIONS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
HELD_OUT = 4  # every fourth row


def choose_damping(
    rows: Float[Tensor, "m d"], block_size: int | None, sizes: Sequence[int], reduce: Reduce | None = None
) -> float:
    """The fraction of the mean diagonal of GᵀG/m that makes held-out gradients most likely.

    F is built on three quarters of the rows; the others are treated as draws from a normal distribution with covariance
    F, and the λ with the smallest log det F + mean gᵀF⁻¹g wins. With `reduce`, the rows are this rank's columns.
    """
    held = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    held[HELD_OUT - 1 :: HELD_OUT] = True
    sums = torch.tensor([float(rows.double().square().sum()), rows.numel()], dtype=torch.float64, device=rows.device)
    squares, count = (sums if reduce is None else reduce(sums)).tolist()
    scale = squares / count
    if scale == 0 or not bool(held.any()):
        found = f"{len(rows)} rows with a mean square of {scale:g} do not allow that: give a number"
        raise ValueError(f'damping="auto" needs gradients to hold out and to scale by; {found}')
    judges = rows[held].T.contiguous()
    candidates = sorted((fraction * scale for fraction in FRACTIONS), reverse=True)
    shared = block_size is None
    options = BlockOptions(block_size, None if shared else sizes)
    parts = build_blocks(rows[~held], candidates[0], options, reduce if shared else None)
    unlikely = torch.zeros(len(candidates), dtype=torch.float64, device=rows.device)
    for number, damping in enumerate(candidates):
        for blocks in parts:
            blocks.refactor(damping)
            unlikely[number] += blocks.quadratic_form(judges[blocks.run.columns]).mean() - blocks.logdet()
    if reduce is not None and not shared:
        unlikely = reduce(unlikely)
    return candidates[int(unlikely.argmin())]

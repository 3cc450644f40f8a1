"""WoodFisher's inverse of a block, in place: what its times are measured with."""

import torch
from torch import Tensor


def rank_one_steps(rows: Tensor, damping: float, num_grads: int) -> Tensor:
    """The inverses of λI + (1/num_grads) Σ g gᵀ over these rows, by one step of Sherman and Morrison a row.

    `rows` are [blocks, m, b], the inverses [blocks, b, b]. A step reads the inverse for a product, and reads and writes
    it for the update; nothing of its size is allocated besides. `mfac.reference.woodbury_recursion` is the same without
    that care.
    """
    blocks, _, b = rows.shape
    inverse = torch.eye(b, dtype=rows.dtype, device=rows.device).div_(damping).repeat(blocks, 1, 1)
    for g in rows.transpose(0, 1).unsqueeze(-1):  # [blocks, b, 1]
        v = inverse @ g
        v /= (num_grads + g.transpose(1, 2) @ v).sqrt()
        inverse.baddbmm_(v, v.transpose(1, 2), alpha=-1)
    return inverse

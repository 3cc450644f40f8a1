"""SparseGPT (Frantar and Alistarh, 2023): each row of a layer pruned column by column, errors pushed to the right."""

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor, nn

from experiments.baselines.layer_moments import find_layers, layer_moments
from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn
from mfac.pruning.weights import Names, choose_targets

BLOCK = 128


def sparse_gpt(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], sparsity: float | None, *, pattern: str | None = None,
    damping: float = 0.01, targets: Names = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Prunes all layers to the same sparsity, or to 2:4, block by block of the model; the masks, True = kept.

    The inputs of a block are those that the pruned blocks before it give; `damping` is relative to the mean diagonal.
    """
    layers = find_layers(model, choose_targets(model, targets), "sparsegpt")
    found, masks = list(batches), {}
    for _, group in groupby(layers, lambda name: [part for part in name.split(".") if part.isdigit()][:1]):
        part = {name: layers[name] for name in group}
        for name, moments in layer_moments(model, loss_fn, found, len(found), part, backward=False).items():
            weight = part[name].weight
            W, H = weight.detach().flatten(1).double(), moments.inputs[0] / moments.positions
            with torch.no_grad():
                weight.copy_(prune_rows(W, H, sparsity, damping, groups=pattern == "2:4").view_as(weight))
            masks[name] = weight != 0
    return masks


def prune_rows(W: Tensor, H: Tensor, sparsity: float | None, damping: float, groups: bool = False) -> Tensor:
    """W [o, i] with the weights of least w²/[H⁻¹]² removed in every 128 columns (2 of 4 with `groups`), rest adapted.

    U is the upper Cholesky factor of (H + λI)⁻¹: its row j, over its diagonal, is the update for removing column j when
    the columns before it are fixed.
    """
    H = H + damping * H.diagonal().mean() * torch.eye(len(H)).to(H)
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    W = W.clone()
    for start in range(0, W.shape[1], BLOCK):
        stop = min(start + BLOCK, W.shape[1])
        part, diagonal = W[:, start:stop], U.diagonal()[start:stop]
        removed = torch.zeros_like(part, dtype=torch.bool)
        if not groups:
            scores = part.square() / diagonal.square()
            removed = scores <= scores.flatten().kthvalue(max(1, round(sparsity * scores.numel()))).values
        errors = torch.zeros_like(part)
        for j in range(stop - start):
            if groups and j % 4 == 0:
                scores = part[:, j : j + 4].square() / diagonal[j : j + 4].square()
                removed[:, j : j + 4] = scores.argsort(1).argsort(1) < 2
            errors[:, j] = torch.where(removed[:, j], part[:, j], 0.0) / diagonal[j]
            part[:, j:] -= torch.outer(errors[:, j], U[start + j, start + j : stop])
        W[:, start:stop] = part.masked_fill(removed, 0.0)
        W[:, stop:] -= errors @ U[start:stop, stop:]
    return W

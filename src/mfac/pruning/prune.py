"""mfac.prune: a trained model to a target sparsity, by Optimal Brain Surgeon on the empirical Fisher matrix."""

import os
from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import nn

from mfac.gradients.batches import Batch
from mfac.gradients.collect import Fisher
from mfac.gradients.losses import LossFn
from mfac.layout import Masks
from mfac.pruning.options import PruningOptions, Scope
from mfac.pruning.result import PruningResult
from mfac.pruning.step import Pruner
from mfac.pruning.weights import Names


def prune(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    sparsity: float | Mapping[str, float] | None,
    *,
    num_grads: int = 64,
    block_size: int | None = 128,
    damping: float | str = 1e-5,
    recomputations: int = 16,
    update: str = "joint",
    scope: Scope = "global",
    pattern: str | None = None,
    targets: Names = None,
    ignore: Names = None,
    masks: Masks = None,
    method: str = "mfac",
    order: str = "scores",
    floor: float = 1,
    per_sample: bool = False,
    fisher: Fisher = "empirical",
    bn_batches: Iterable[Batch] | None = None,
    loss_batches: int = 4,
    rows_dir: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    on_step: Callable[[PruningResult], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> PruningResult:
    """Removes weights in place until `round(sparsity * count)` of them are exactly zero; the remaining ones compensate.

    Each of `recomputations` steps collects new gradients, removes the weights with the smallest θ_i²/(2[F⁻¹]_ii), and
    updates the others to compensate. If a step fails or is interrupted, the model is as the step before left it.

    With a `process_group`, all ranks prune the same model together, each with batches of its own: gradients are divided
    by columns, and all ranks end with the same masks and weights, bit for bit. A failure on one rank fails on all.

    Args:
        model: any module; the random state, training flags and `.grad` are left alone.
        loss_fn: (model, batch) -> scalar; see `criterion_loss` and `model_loss` for ready ones.
        batches: any iterable, consumed pass after pass: each recomputation sees the next batches.
        sparsity: the fraction of the targets' weights that is zero in the end; or {name or "re:...": fraction}, which
            makes exactly these the targets, each with its own; or None with an "N:M" pattern.
        num_grads: m, gradients per recomputation; one per batch, so the batch size is that of one gradient.
        block_size: diagonal blocks of F of this many weights, inside tensors; None: the full matrix.
        damping: λ; "auto": one of several fractions of F's mean diagonal, chosen by held-out gradients.
        recomputations: steps; each keeps the same fraction of the remaining weights.
        update: how the others move: "joint" (exact removal of the whole set), "obs" (the sum of single-weight updates),
            "none".
        scope: "global": all weights compete; "layer": each tensor has the same sparsity.
        pattern: None; "N:M": at most N of every M along dimension 1 are kept; "row", "channel": whole slices along
            dimension 0 or 1, as many as fit into the sparsity.
        targets: names or "re:..." patterns; None: every parameter of two or more dimensions except embeddings.
        ignore: names or patterns to leave out.
        masks: {name or parameter: bool tensor}, False where a weight is removed already: it counts, and stays zero.
        method: "mfac", or for comparison "magnitude" or "diagonal".
        order: "scores", or "greedy": the exact order, one weight after another, inside each block.
        floor: the least that each tensor keeps; below 1, a fraction of it.
        per_sample: one gradient per sample instead of one per batch.
        fisher: "empirical" takes the labels of the data, "sampled" draws them from the model's output.
        bn_batches: batches on which batch-norm statistics are re-estimated after each step; None: they stay.
        loss_batches: how many batches the reported loss is taken over.
        rows_dir: a folder for the gradients where they do not fit in memory.
        seed: of shuffling batches and of drawn labels; None: the present random state.
        progress: a progress bar for the gradients: True, False, or None: on a terminal.
        on_step: called with the result so far after each complete step; on every rank.
        process_group: whose ranks prune together; `num_grads` counts the gradients of all of them.

    Returns:
        The masks, the sparsity reached, and a record of each step.

    Raises:
        ValueError: an argument that does not fit, a sparsity below the present one, too few batches, or a model whose
            loss is not finite; nothing is changed then.
        RuntimeError: a loss or a gradient that became non-finite.
    """
    options = PruningOptions.among(locals())
    return Pruner(model, loss_fn, batches, sparsity, options, masks).run(on_step)

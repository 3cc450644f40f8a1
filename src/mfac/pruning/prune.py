"""mfac.prune: a trained model to a target sparsity, by Optimal Brain Surgeon on the Fisher matrix."""

import os
from collections.abc import Callable, Iterable, Mapping

import torch.distributed as dist
from torch import nn

from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn, OutputFn
from mfac.layout import Masks
from mfac.pruning.options import PruningOptions, Scope
from mfac.pruning.result import PruningResult
from mfac.pruning.step import Pruner
from mfac.pruning.weights import Names


def prune(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], sparsity: float | Mapping[str, float] | None, *,
    num_grads: int | None = None, block_size: int | str | None = "row", damping: float | str = "auto",
    recomputations: int = 16, update: str = "auto", prior: str | None = None, scope: Scope = "global",
    pattern: str | None = None, targets: Names = None, ignore: Names = None, masks: Masks = None, method: str = "mfac",
    order: str = "scores", floor: float = 1, per_sample: bool = False, fisher: str = "auto",
    output_fn: OutputFn | None = None, recalibrate: bool | str | Iterable[Batch] = "auto",
    refit: bool | str = "auto", bn_batches: Iterable[Batch] | None = None, loss_batches: int = 4,
    rows_dir: str | os.PathLike[str] | None = None, memory: int | str | None = None, seed: int | None = None,
    progress: bool | None = None, on_step: Callable[[PruningResult], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> PruningResult:  # fmt: skip
    """Removes weights in place until `round(sparsity * count)` of them are exactly zero; the remaining ones compensate.

    Each of `recomputations` steps collects new gradients, removes the weights with the smallest θ_i²/(2[F⁻¹]_ii), and
    updates the others to compensate. If a step fails or is interrupted, the model is as the step before left it.

    With a `process_group`, all ranks prune the same model together, each with batches of its own: gradients are divided
    by columns, and all ranks end with the same masks and weights, bit for bit. A failure on one rank fails on all.

    Args:
        model: any module; the random state, training flags and `.grad` are left alone.
        loss_fn: (model, batch) -> the mean loss; see `criterion_loss`, also for sums, and `model_loss` for ready ones.
        batches: any iterable, consumed pass after pass: each recomputation sees the next batches.
        sparsity: the fraction of the targets' weights that is zero in the end; or {name or "re:...": fraction}, which
            makes exactly these the targets, each with its own; or None with an "N:M" pattern.
        num_grads: batches of a recomputation, each of them a gradient (or, by output, rows for each sample or token).
            None: 64; by output, as many as give two rows for each weight of a block, and one pass at most.
        block_size: diagonal blocks of F: "row": the inputs of each output (of a convolution, channels x kernel); an
            int: this many weights side by side, inside tensors; None: the full matrix.
        damping: λ; "auto": a fraction of the mean diagonal of F in each tensor.
        recomputations: steps; each keeps the same fraction of the remaining weights.
        update: how the others move: "joint" (exact removal of the whole set), "obs" (the sum of single-weight updates),
            "none"; "auto": joint, by output with the Kronecker prior; none in `GradualPruner`.
        prior: "kron" mixes the Kronecker factors of linear and convolution layers into F, which also join the outputs
            of a layer, by output; of wide layers they are all of F. None.
        scope: "global": all weights compete; "layer": each tensor has the same sparsity.
        pattern: None; "N:M": at most N of every M along dimension 1 are kept; "row", "channel": whole slices along
            dimension 0 or 1, as many as fit into the sparsity.
        targets: names or "re:..." patterns; None: every parameter of two or more dimensions except embeddings.
        ignore: names or patterns to leave out.
        masks: {name or parameter: bool tensor}, False where a weight is removed already: it counts, is set to zero, and
            stays so.
        method: "mfac", or for comparison "magnitude" or "diagonal".
        order: "scores", or "greedy": the exact order, one weight after another, inside each block.
        floor: the least that each tensor keeps; below 1, a fraction of it.
        per_sample: one gradient per sample instead of one per batch.
        fisher: "gauss-newton" (random signs at the outputs, no labels), "empirical" (the labels of the data), "sampled"
            (labels drawn from the outputs); "auto": the first where the outputs are known, else the second.
        output_fn: (model, batch) -> logits [samples, ..., classes]; ready losses know theirs.
        recalibrate: re-estimate batch-norm statistics at the end: "auto" and True: on as many batches as a step takes
            ("auto": if the model has any); False; or batches of your own.
        refit: fit all that is left to the outputs from before, at the end, by `mfac.refit` on as many batches as a step
            takes: True, False, or "auto": on one process, by output with fisher="gauss-newton" and update="auto",
            unless `recalibrate` is False. Kept only if the outputs on every eighth batch, left out of it, come closer.
        bn_batches: batches on which batch-norm statistics are re-estimated after each step; None: they stay.
        loss_batches: how many batches the reported loss is taken over.
        rows_dir: a folder for the gradients where they do not fit in memory.
        memory: for the matrices of a step, by output: "4GB", or bytes; more passes over the batches of a step. A prior
            joins the outputs of the layers that fit as a whole. None: half of what is available.
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

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
        batches: any iterable; it is restarted when it ends, and each recomputation takes the next batches.
        sparsity: the final fraction of zeros among the targets' weights; or {name or "re:...": fraction}, which selects
            exactly these targets, each with its own fraction; or None with an "N:M" pattern.
        num_grads: batches per recomputation. Each gives one gradient or, by output, rows for each sample or token.
            None: 64; by output, enough for two rows per weight of a block, and at most one pass.
        block_size: diagonal blocks of F: "row": the inputs of each output (of a convolution, channels x kernel); an
            int: this many consecutive weights of a tensor; None: the full matrix.
        damping: λ; "auto": a fraction of the mean diagonal of F in each tensor.
        recomputations: number of steps; each keeps the same fraction of the remaining weights.
        update: how the remaining weights compensate: "joint" (exact for the whole set), "obs" (the sum of single-weight
            updates), "none"; "auto": joint, by output with the Kronecker prior; none in `GradualPruner`.
        prior: None; "kron" mixes the Kronecker factors of linear and convolution layers into F. By output, they also
            couple the outputs of a layer; for wide layers, F consists of them alone.
        scope: "global": all weights compete; "layer": each tensor has the same sparsity.
        pattern: None; "N:M": at most N of every M along dimension 1 are kept; "row", "channel": whole slices along
            dimension 0 or 1, as many as the sparsity allows.
        targets: names or "re:..." patterns; None: every parameter of two or more dimensions except embeddings.
        ignore: names or patterns to leave out.
        masks: {name or parameter: bool tensor}, False where a weight is already removed. These weights count towards
            the sparsity, are set to zero, and stay zero.
        method: "mfac"; for comparison, "magnitude" or "diagonal".
        order: "scores"; or "greedy": one weight after another inside each block, in the exact order.
        floor: the minimum number of weights that each tensor keeps; below 1, a fraction of the tensor.
        per_sample: one gradient per sample instead of one per batch.
        fisher: "gauss-newton" (random signs at the outputs, no labels), "empirical" (the labels of the data), "sampled"
            (labels drawn from the outputs); "auto": the first if the outputs are known, else the second.
        output_fn: (model, batch) -> logits [samples, ..., classes]; ready losses know theirs.
        recalibrate: re-estimate batch-norm statistics at the end. True: on as many batches as a step takes; "auto": the
            same, if the model has batch norm; False: never; or your own batches.
        refit: at the end, fit the remaining parameters to the dense outputs by `mfac.refit`, on as many batches as a
            step takes. True, False, or "auto": on one process, by output with fisher="gauss-newton" and update="auto",
            unless `recalibrate` is False. Kept only if it helps on every eighth batch, which is held out.
        bn_batches: batches on which batch-norm statistics are re-estimated after each step; None: they stay.
        loss_batches: number of batches for the reported loss.
        rows_dir: a folder for the gradients, if they do not fit in memory.
        memory: limit for the matrices of a step, by output: "4GB", or bytes. A smaller limit takes more passes over the
            batches; a prior couples the outputs of layers that fit as a whole. None: half of the available memory.
        seed: for shuffled batches and sampled labels; None: the current random state.
        progress: show a progress bar for the gradients: True, False, or None: on a terminal.
        on_step: called after each complete step, on every rank, with the result so far.
        process_group: the ranks that prune together; `num_grads` counts the gradients of all of them.

    Returns:
        The masks, the sparsity reached, and a record of each step.

    Raises:
        ValueError: if an argument is invalid, the sparsity is below the current one, there are too few batches, or the
            loss of the model is not finite; the model is then unchanged.
        RuntimeError: if a loss or a gradient becomes non-finite.
    """
    options = PruningOptions.among(locals())
    return Pruner(model, loss_fn, batches, sparsity, options, masks).run(on_step)

"""mfac.prune: a trained model to a target sparsity, by Optimal Brain Surgeon on the empirical Fisher matrix."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfac.columns import Ranks, ranks_of
from mfac.gradients.batches import Batch
from mfac.gradients.collector import Fisher
from mfac.gradients.one_batch import LossFn
from mfac.layout import Masks
from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.budget import Pool, Scope, final_pools, step_pools, tensor_counts
from mfac.pruning.loss_probe import LossProbe
from mfac.pruning.methods import Estimation, make_method
from mfac.pruning.patterns import NOfM, Pattern, parse_pattern
from mfac.pruning.result import PruningResult
from mfac.pruning.steps import Stepper
from mfac.pruning.targets import Names, choose_targets, matching_ids
from mfac.pruning.weights import MaskedWeights

RANK_SEEDS = 1_000_003  # between the random states of two ranks; more steps than anybody prunes in
UPDATES = ("joint", "obs", "none")
ORDERS = ("scores", "greedy")


@torch.no_grad()
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
    """Removes weights in place until `round(sparsity * count)` of them are exactly zero; what stays makes up for it.

    At each of `recomputations` steps, gradients are taken anew, the weights with the smallest θ_i²/(2[F⁻¹]_ii) go, and
    the others move so as to make up for it. If a step fails or is interrupted, the model is as the step before left it.

    With a `process_group` all ranks prune the same model together, each with batches of its own: gradients are shared
    out by columns, and all ranks end with the same masks and weights, bit for bit. What fails on one rank fails on all.

    Args:
        model: any module; the random state, training flags and `.grad` are left alone.
        loss_fn: (model, batch) -> scalar; see `criterion_loss` and `model_loss` for ready ones.
        batches: any iterable, run through on and on: each recomputation sees the next batches.
        sparsity: the fraction of the targets' weights that is zero in the end; or {name or "re:...": fraction}, which
            makes targets of just these, each with its own; or None with an "N:M" pattern.
        num_grads: m, gradients for each recomputation; one a batch, so its size is the batch size.
        block_size: diagonal blocks of F of this many weights, inside tensors; None: the full matrix.
        damping: λ; "auto": one of several fractions of F's mean diagonal, by gradients held out (see the records).
        recomputations: steps; each keeps the same fraction of the weights that are left.
        update: how the others move: "joint" (the exact removal of the whole set), "obs" (the sum of single-weight
            updates), "none".
        scope: "global": all weights compete; "layer": each tensor has the same sparsity.
        pattern: None; "N:M": at most N of every M along dimension 1 are kept; "row", "channel": whole slices along
            dimension 0 or 1, as many as fit into the sparsity.
        targets: names or "re:..." patterns; None: every parameter of two or more dimensions but embeddings.
        ignore: names or patterns that are left out.
        masks: {name or parameter: bool tensor}, False where a weight is removed already: it counts, and stays zero.
        method: "mfac", or for comparison "magnitude", "diagonal", "wanda", "woodfisher", "lobs", "kfac".
        order: "scores", or "greedy": the exact order of one weight after the other inside each block.
        floor: the least that each tensor keeps; below 1, a fraction of it.
        per_sample: one gradient a sample instead of one a batch.
        fisher: "empirical" takes the labels of the data, "sampled" draws them from the model's output.
        bn_batches: what batch-norm statistics are re-estimated on after each step; None: they stay.
        loss_batches: how many batches the reported loss is taken over.
        rows_dir: a folder for the gradients where they do not fit in memory.
        seed: of the order of shuffling batches and of labels that are drawn; None: as the random state has it.
        progress: a bar for the gradients: True, False, or None: on a terminal.
        on_step: called with the result so far after each complete step; on every rank.
        process_group: whose ranks prune together; `num_grads` is the number of their gradients in all. For the methods
            "mfac", "diagonal" and "magnitude".

    Returns:
        The masks, the sparsity reached, and a record of each step.

    Raises:
        ValueError: an argument that does not fit, a sparsity below the present one, too few batches, or a model whose
            loss is not finite; nothing is changed then.
        RuntimeError: a loss or a gradient that became not finite.
    """
    ranks = ranks_of(process_group)
    with _folder(rows_dir) as folder:
        with ranks.together("looking at the arguments"):
            _check_choice("update", update, UPDATES)
            _check_choice("order", order, ORDERS)
            shape = parse_pattern(pattern)
            _check_settings(recomputations, loss_batches, method, order, shape)
            targets = _targets_of(sparsity, targets)
            weights = MaskedWeights(model, choose_targets(model, targets, ignore), masks)
            pools = _pools(model, weights, sparsity, scope, shape, floor)
            counts = tensor_counts(weights.masks, floor)
            steps = step_pools(pools, [sum(counts[name].kept for name in pool.names) for pool in pools], recomputations)
            stream = batches if isinstance(batches, BatchStream) else BatchStream(batches, _rank_seed(seed, ranks))
            stream.needed = f" ({len(steps)} recomputations need {len(steps) * num_grads} gradients in all)"
            estimation = Estimation(
                loss_fn, num_grads, block_size, damping, per_sample, fisher, folder, seed or 0, progress, ranks
            )
            estimation.check(weights)
            stepper = Stepper(
                weights=weights,
                stream=stream,
                method=make_method(method, estimation, weights, shape),
                probe=LossProbe(model, loss_fn, stream.peek(loss_batches), ranks),
                update=update,
                order=order,
                pattern=shape,
                floors={name: count.floor for name, count in counts.items()},
                bn_batches=bn_batches,
                ranks=ranks,
            )
        if ranks.size > 1:
            _make_alike(
                estimation, weights, sparsity=sparsity, recomputations=recomputations, scope=scope, floor=floor,
                block_size=block_size, damping=damping, update=update, order=order, pattern=pattern, method=method,
                bn_batches=bn_batches is not None,
            )  # fmt: skip
        return _run(stepper, steps, on_step)


def _make_alike(estimation: Estimation, weights: MaskedWeights, **arguments: object) -> None:
    """Sees that all ranks have the same weights, masks and arguments; buffers become those of the first rank."""
    estimation.check_ranks(weights, arguments)
    for buffer in weights.model.buffers():  # running statistics differ after training under DDP
        estimation.ranks.from_first_(buffer)


def _rank_seed(seed: int | None, ranks: Ranks) -> int | None:
    """Loaders that shuffle by the random state give other batches on every rank."""
    return None if seed is None else seed + RANK_SEEDS * ranks.rank


@contextmanager
def _folder(rows_dir: str | os.PathLike[str] | None) -> Iterator[str | None]:
    """A folder of our own for the rows, which is gone afterwards."""
    if rows_dir is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mfac-rows-", dir=rows_dir) as folder:
        yield folder


def _run(stepper: Stepper, steps: list[list[Pool]], on_step: Callable[[PruningResult], None] | None) -> PruningResult:
    weights = stepper.weights
    result = PruningResult({**weights.other_masks, **weights.masks}, tuple(weights.targets))
    loss = stepper.probe.before()
    for number, pools in enumerate(steps, 1):
        record = stepper.step(number, pools, loss)
        loss = record.loss_after
        result.masks.update(weights.masks)
        result.history.append(record)
        if on_step is not None:
            with stepper.ranks.together("on_step"):
                on_step(result)
    return result


def _targets_of(sparsity: float | Mapping[str, float] | None, targets: Names) -> Names:
    if not isinstance(sparsity, Mapping):
        return targets
    if targets is not None:
        raise ValueError("sparsity by name says itself what is pruned; leave targets out")
    return list(sparsity)


def _pools(
    model: nn.Module,
    weights: MaskedWeights,
    sparsity: float | Mapping[str, float] | None,
    scope: Scope,
    pattern: Pattern,
    floor: float,
) -> list[Pool]:
    """What is to be kept in the end."""
    if pattern is not None:
        for name, mask in weights.masks.items():
            pattern.check(name, mask.shape)
    if isinstance(pattern, NOfM):
        if sparsity is not None and not (isinstance(sparsity, float) and abs(sparsity - pattern.sparsity) < 1e-9):
            raise ValueError(
                f"pattern {pattern} has a sparsity of its own, {pattern.sparsity:g}; pass sparsity=None, "
                f"not {sparsity!r}"
            )
        each = [Pool((name,), pattern.final_keep(mask)) for name, mask in weights.masks.items()]
        return each if scope == "layer" else [Pool(tuple(weights.masks), sum(pool.keep for pool in each))]
    if sparsity is None:
        raise ValueError('sparsity=None is for an "N:M" pattern, which has its own; give a number from 0 to 1')
    if isinstance(sparsity, Mapping):
        sparsity = _by_target(model, weights.targets, sparsity)
    return final_pools(tensor_counts(weights.masks, floor), sparsity, scope)


def _by_target(model: nn.Module, targets: Mapping[str, Tensor], sparsity: Mapping[str, float]) -> dict[str, float]:
    """The sparsity of each target; where several patterns match one, the last of them."""
    found = {}
    for item, value in sparsity.items():
        ids = matching_ids(model, item, "sparsity")
        found.update({name: value for name, tensor in targets.items() if id(tensor) in ids})
    return found


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _check_settings(recomputations: int, loss_batches: int, method: str, order: str, pattern: Pattern) -> None:
    for name, value in (("recomputations", recomputations), ("loss_batches", loss_batches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive int, not {value!r}")
    if order == "greedy" and (method != "mfac" or pattern is not None):
        raise ValueError('order="greedy" is for method="mfac" without a pattern; use order="scores"')

"""After pruning: the remaining weights are fitted to the outputs of the dense model, without labels."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients.batches import Batch, move
from mfac.gradients.losses import LossFn, OutputFn, Reading, family, ready_loss
from mfac.gradients.model_state import evaluation
from mfac.memory import check_count
from mfac.pruning.batch_norm import recalibrate, running_norms, skipping_single_samples
from mfac.pruning.mask_keeper import attach_masks
from mfac.pruning.weights import restored_on_error

HELD_OUT = 8  # one of so many batches shows whether refitting helps
RATES = (1e-3, 1e-4)  # the second if the first does not


class NotCloserError(RuntimeError):
    """Refitting did not bring the outputs closer."""


@torch.inference_mode(False)
def refit(
    model: nn.Module, dense: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], masks: Mapping[Any, Tensor], *,
    passes: int = 4, lr: float = 1e-3, output_fn: OutputFn | None = None,
) -> list[float]:  # fmt: skip
    """Trains a pruned model, in place, to have the outputs of the dense one: a short distillation on calibration data.

        dense = copy.deepcopy(model)
        result = mfac.prune(model, loss_fn, batches, 0.95)
        mfac.refit(model, dense, loss_fn, batches, result.masks)

    All trainable parameters move; removed weights stay zero. Adam, whose learning rate falls linearly to zero, lowers
    the Kullback-Leibler divergence of the outputs (or their squared distance, for a squared error). Batch norm uses the
    statistics of each batch, which are re-estimated at the end; everything else is in eval mode.

    Args:
        model: the pruned model; its training flags, `.grad` and the random state are left alone.
        dense: another module with the outputs that are wanted.
        loss_fn: `criterion_loss(...)` or `model_loss`, which know the outputs; or any, with `output_fn`.
        batches: the calibration batches of pruning; labels decide only which positions count.
        masks: {name or parameter: bool tensor}, False where a weight is removed.
        passes: over the batches.
        lr: the first learning rate.
        output_fn: (model, batch) -> logits [samples, ..., classes].

    Returns:
        The mean divergence in each pass.

    Raises:
        ValueError: an argument that does not fit.
        RuntimeError: a divergence that is not finite. The model is as it was before, as after any other error.
    """
    check_count("passes", passes)
    ready, device = ready_loss(loss_fn, output_fn, "refit"), next(model.parameters()).device
    given = [move(batch, device) for batch in batches]
    if not given:
        raise ValueError("batches is empty; at least one batch is needed")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("the model has no trainable parameter; call requires_grad_(True) on those to refit")
    if not trained.isdisjoint(map(id, dense.parameters())):
        found = "dense is the model itself, or shares its weights"
        raise ValueError(f"{found}; keep a copy.deepcopy of it from before pruning, and pass that")
    norms = running_norms(model)
    with restored_on_error([*model.parameters(), *model.buffers()]):
        with evaluation(dense), evaluation(model):
            for norm in norms:
                norm.train()
            optimizer = torch.optim.Adam(model.parameters(), lr)  # leaves frozen ones, which have no gradient
            total, parts = passes * len(given), ready.reading(dense, given[0], "refit")
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
            with attach_masks(optimizer, masks, model):
                means = [
                    _descend(optimizer, scheduler, lambda batch: divergence(parts, model, dense, batch), given)
                    for _ in range(passes)
                ]
        if norms:
            recalibrate(model, given, partial(loss_fn, model))
    return means


def refit_if_closer(
    model: nn.Module, dense: nn.Module, loss_fn: LossFn, batches: list[Batch], masks: Mapping[Any, Tensor],
    output_fn: OutputFn | None,
) -> bool:  # fmt: skip
    """Refits if that brings the outputs on every eighth batch, which it does not see, closer to those of `dense`."""
    given = [move(batch, next(model.parameters()).device) for batch in batches]
    apart, others = given[::HELD_OUT], [batch for place, batch in enumerate(given) if place % HELD_OUT]
    if not others or not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    parts = ready_loss(loss_fn, output_fn, "refit").reading(dense, given[0], "refit")

    def distance() -> float:
        with evaluation(model):
            return sum(float(divergence(parts, model, dense, batch).detach()) for batch in apart)

    before = distance()
    for lr in RATES:
        with suppress(NotCloserError), restored_on_error([*model.parameters(), *model.buffers()]):
            refit(model, dense, loss_fn, others, masks, lr=lr, output_fn=output_fn)
            if distance() < before:
                return True
            raise NotCloserError
    return False


def copied(model: nn.Module) -> nn.Module | None:
    """A copy for `refit`, in eval mode; None, with a warning, of a model that cannot be copied."""
    try:
        return copy.deepcopy(model).eval().requires_grad_(False)
    except Exception as error:
        warnings.warn(f"the model cannot be copied ({error}), so it is not refitted; refit=False says so", stacklevel=2)
        return None


def fingerprint(model: nn.Module | None) -> float | None:
    """A number that other weights do not have."""
    return None if model is None else float(sum(p.detach().double().abs().sum() for p in model.parameters()))


def _descend(
    optimizer: torch.optim.Optimizer, scheduler: Any, loss_of: Callable[[Batch], Tensor], batches: list[Batch]
) -> float:  # fmt: skip
    """A step down the loss of each batch; their mean."""
    found = []
    for batch in batches:
        optimizer.zero_grad()
        with skipping_single_samples():
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            found.append(loss.detach())
    if not found:
        raise ValueError("no batch has more than one sample, which batch norm needs; pass larger ones")
    mean = float(torch.stack(found).mean())
    if not mean < torch.inf:
        raise NotCloserError(f"the divergence of the outputs became {mean}, and the model is unchanged; lower lr")
    return mean


def divergence(parts: Reading, model: nn.Module, dense: nn.Module, batch: Batch) -> Float[Tensor, ""]:
    """The mean over positions of KL(dense ‖ model), or of the squared distance; ignored labels do not count."""
    aim = parts(dense, batch)[1].detach()  # gradients are on, which some models need
    criterion, z, targets = parts(model, batch)
    kind = family(criterion, "refit")
    if kind == "squared error":
        return F.mse_loss(z, aim)
    if kind == "sigmoid":
        cross_entropy = partial(F.binary_cross_entropy_with_logits, target=aim.sigmoid())
        return cross_entropy(z) - cross_entropy(aim)
    each = F.kl_div(z.log_softmax(1), aim.log_softmax(1), log_target=True, reduction="none").sum(1)
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        each = each[targets != getattr(criterion, "ignore_index", -100)]
    return each.sum() / max(1, each.numel())

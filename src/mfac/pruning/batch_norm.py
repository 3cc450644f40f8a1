"""Batch-norm statistics re-estimated after weights have changed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mfac.gradients.batches import Batch, move
from mfac.gradients.model_state import evaluation
from mfac.pruning.weights import restored_on_error

TOO_SMALL = (
    "no batch for batch norm has more than one sample; pass larger ones (a list, or a loader that can start again), "
    "or recalibrate=False and refit=False"
)


def running_norms(model: nn.Module) -> list[Any]:
    """The batch-norm layers that have running statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


@torch.no_grad()
def recalibrate(
    model: nn.Module, batches: Iterable[Batch], forward: Callable[[Batch], object] | None = None
) -> list[Any]:
    """Running means and variances over one pass of `batches`: of forward(batch), all else in eval mode.

    Without `forward`, as by `torch.optim.swa_utils.update_bn`: all in training mode, and each batch is a tensor, or
    begins with the input. Layers that it does not use keep their statistics. Returns the layers.
    """
    norms, device = running_norms(model), next(model.parameters()).device
    flags = [(module, module.training) for module in model.modules()]
    before = [(norm.momentum, norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    run = forward or (lambda batch: model(batch[0] if isinstance(batch, list | tuple) else batch))
    try:
        model.train(forward is None)
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        is_usable = False
        for batch in batches:
            with skipping_single_samples(), restored_on_error([part for norm in norms for part in norm.buffers()]):
                run(move(batch, device))
                is_usable = True
        if not is_usable:
            raise ValueError(TOO_SMALL)
    finally:
        for module, flag in flags:
            module.training = flag
        for norm, (momentum, mean, variance) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if not int(norm.num_batches_tracked):
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(variance)
    return norms


def check_sizes(model: nn.Module, batches: Iterable[Batch], forward: Callable[[Batch], object]) -> None:
    """ValueError if each of the batches is a single sample without a variance; goes to the first that is not."""
    with evaluation(model), torch.no_grad():
        for norm in running_norms(model):
            norm.train()
        for batch in batches:
            with skipping_single_samples():
                forward(move(batch, next(model.parameters()).device))
                return
    raise ValueError(TOO_SMALL)


@contextmanager
def skipping_single_samples() -> Iterator[None]:
    """Leaves out a batch whose single sample has no variance, such as the last one of a pass."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise


@torch.no_grad()
def average_statistics(norms: list[Any], reduce: Callable[[Tensor], Tensor]) -> None:
    """Averages the statistics over the batches of all ranks, as `update_bn` does over the batches of one."""
    for norm in norms:
        mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
        total = reduce(torch.cat([mean.double() * count, variance.double() * count, count.double().reshape(1)]))
        if float(total[-1]):  # the model uses the layer
            mean.copy_(total[: len(mean)] / total[-1])
            variance.copy_(total[len(mean) : -1] / total[-1])
            count.copy_(total[-1])

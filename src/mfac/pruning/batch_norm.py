"""Batch-norm statistics re-estimated after weights have changed."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mfac.gradients.batches import Batch, move


def running_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch-norm layers that have running statistics."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


@torch.no_grad()
def recalibrate(
    model: nn.Module, batches: Iterable[Batch], forward: Callable[[Batch], object] | None = None
) -> list[_BatchNorm]:
    """Running means and variances over one pass of `batches`: of forward(batch), all else in eval mode.

    Without `forward`, as by `torch.optim.swa_utils.update_bn`: all in training mode, and each batch is a tensor, or
    begins with the input. Returns the layers that were re-estimated.
    """
    norms, device = running_norms(model), next(model.parameters()).device
    flags = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    run = forward or (lambda batch: model(batch[0] if isinstance(batch, list | tuple) else batch))
    try:
        model.train(forward is None)
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        for batch in batches:
            run(move(batch, device))
        counted = norms[0].num_batches_tracked
        if counted is not None and not int(counted):
            raise ValueError("bn_batches gave no batch; pass a list, or a loader that can start again after every step")
    finally:
        for module, flag in flags:
            module.training = flag
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return norms


@torch.no_grad()
def average_statistics(norms: list[_BatchNorm], reduce: Callable[[Tensor], Tensor]) -> None:
    """Averages the statistics over the batches of all ranks, as `update_bn` does over the batches of one."""
    for norm in norms:
        mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert mean is not None and variance is not None and count is not None  # noqa: PT018
        total = reduce(torch.cat([mean.double() * count, variance.double() * count, count.double().reshape(1)]))
        if float(total[-1]):  # the model uses the layer
            mean.copy_(total[: len(mean)] / total[-1])
            variance.copy_(total[len(mean) : -1] / total[-1])
            count.copy_(total[-1])

"""Batch-norm statistics taken anew after weights have changed."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from mfac.columns import Ranks
from mfac.gradients.batches import Batch


def recalibrate(model: nn.Module, batches: Iterable[Batch], ranks: Ranks | None = None) -> None:
    """Running means and variances over one pass of `batches`, by `torch.optim.swa_utils.update_bn`.

    Each batch is a tensor, or a tuple that begins with the model's input. Training flags and momenta are as before
    afterwards, whatever happens. With several ranks, each with batches of its own, all get the averages over all
    batches.

    Raises:
        ValueError: the model has no batch norm, or `batches` gave nothing.
    """
    ranks = Ranks() if ranks is None else ranks
    with ranks.together("batch-norm statistics"):
        norms = _estimate(model, batches)
    if ranks.size > 1:
        _average(norms, ranks)


def _estimate(model: nn.Module, batches: Iterable[Batch]) -> list[_BatchNorm]:
    """Takes the statistics on one rank; returns the layers that have them."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        raise ValueError("bn_batches was given, and the model has no batch norm with running statistics; leave it out")
    flags = [(module, module.training) for module in model.modules()]
    momenta = [(module, module.momentum) for module in norms]
    try:
        update_bn(batches, model, next(model.parameters()).device)
        counted = norms[0].num_batches_tracked
        if counted is not None and not int(counted):
            raise ValueError(
                "bn_batches gave no batch; pass a list or a loader that can be run through after every step"
            )
    finally:
        for module, flag in flags:
            module.training = flag
        for module, momentum in momenta:
            module.momentum = momentum
    return norms


@torch.no_grad()
def _average(norms: list[_BatchNorm], ranks: Ranks) -> None:
    """Averages over all batches of all ranks: `update_bn` itself averages over batches, so that this is the same."""
    for norm in norms:
        mean, variance, count = _statistics(norm)
        total = ranks.sum_(torch.cat([mean.double() * count, variance.double() * count, count.double().reshape(1)]))
        batches = total[-1]
        if not float(batches):  # a layer that the model does not come to
            continue
        mean.copy_(total[: len(mean)] / batches)
        variance.copy_(total[len(mean) : -1] / batches)
        count.copy_(batches)


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    return norm.running_mean, norm.running_var, norm.num_batches_tracked

"""Batch-norm statistics taken anew after weights have changed."""

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from mfac.gradients.batches import Batch


def recalibrate(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Running means and variances over one pass of `batches`, by `torch.optim.swa_utils.update_bn`.

    Each batch is a tensor, or a tuple that begins with the model's input. Training flags and momenta are as before
    afterwards, whatever happens.

    Raises:
        ValueError: the model has no batch norm, or `batches` gave nothing.
    """
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

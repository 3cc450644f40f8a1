"""Every optimizer class of the package in its configurations, and a small problem on which all of them are tested.

A new class or option is one more line in OPTIMIZERS; the suite then runs for it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mfac import MFAC, FullMatrixAdam, Int8, TopK
from mfac.parameter_groups import group_parameters

SETTINGS: dict[str, Any] = {"lr": 0.02, "num_grads": 5, "damping": 0.1}


def mfac(params: Any, **options: Any) -> MFAC:
    return MFAC(params, **(SETTINGS | options))


def full_matrix(params: Any, **options: Any) -> FullMatrixAdam:
    return FullMatrixAdam(params, **(SETTINGS | options))


def mask_of(tensor: Tensor) -> Tensor:
    """Keeps two of every three weights."""
    return (torch.arange(tensor.numel()) % 3 > 0).view(tensor.shape)


def masked(params: Any, build: Callable[..., Optimizer] = mfac, **options: Any) -> Optimizer:
    """The first parameter is pruned; its weights are set to zero here, as a pruner would have done."""
    params = list(params)
    first = group_parameters(params)[0]["params"][0]
    with torch.no_grad():
        first.mul_(mask_of(first))
    return build(params, **({"masks": {first: mask_of(first)}} | options))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "plain": mfac,
    "nesterov": partial(mfac, momentum=0.9, nesterov=True),
    "l2_decay": partial(mfac, weight_decay=0.01),
    "decoupled_decay": partial(mfac, weight_decay=0.1, decoupled_weight_decay=True, momentum=0.5),
    "int8_window": partial(mfac, window=Int8(block=16, stochastic=True)),
    "topk_window": partial(masked, window=TopK(0.5, block=3)),  # so that every layer has blocks of its own
    "update_every": partial(mfac, update_every=2),
    "max_step_norm": partial(mfac, max_step_norm=0.05),
    "damping_schedule": partial(mfac, damping=lambda step: 0.1 if step < 4 else 0.2),
    "sum": partial(mfac, normalize="sum"),
    "masks_momentum_decay": partial(masked, momentum=0.9, weight_decay=0.01),
    "auto_damping": partial(mfac, damping="auto", lr=0.002),
    "averaged": partial(mfac, momentum=0.8, momentum_on="gradient", weight_decay=0.01),
    "full_matrix": full_matrix,
    "full_matrix_int8": partial(full_matrix, window=Int8(block=16), eps=1e-3),
    "full_matrix_masks_orthogonal": partial(masked, build=full_matrix, orthogonalize=True, weight_decay=0.1),
}
DECAYING = {"averaged", "l2_decay", "decoupled_decay", "masks_momentum_decay", "full_matrix_masks_orthogonal"}


def builds(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("build", [pytest.param(OPTIMIZERS[name], id=name) for name in names])


every_optimizer = builds(OPTIMIZERS)
every_storage = builds(["plain", "int8_window", "topk_window", "masks_momentum_decay", "full_matrix"])
some_optimizers = builds(["nesterov", "update_every", "masks_momentum_decay", "full_matrix"])
# Without decay, and without a second moment, which starts with the first gradient, as torch's Adam has it.
with_past_zeros = builds(name for name in OPTIMIZERS if name not in DECAYING and "full_matrix" not in name)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss on the batch of a step, which is the same whenever it is asked for."""
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
    logits = model(inputs.to(next(model.parameters()).dtype))
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), inputs[:, :3].argmax(1))


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int], scale: float = 1.0) -> list[float]:
    """Plain training over the batches of these steps, with the loss times `scale`; returns the loss before each."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = scale * loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(
    build: Callable[..., Optimizer], steps: int = 8, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Any]:
    """A model, and an optimizer of its named parameters that has taken some steps."""
    model = network() if model is None else model
    optimizer = build(model.named_parameters(), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def ready(build: Callable[..., Optimizer], steps: int, **options: Any) -> tuple[nn.Module, Any]:
    """The same, with the gradients of the next step."""
    model, optimizer = trained(build, steps, **options)
    optimizer.zero_grad()
    loss_of(model, steps).backward()
    return model, optimizer

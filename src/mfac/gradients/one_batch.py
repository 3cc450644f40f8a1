"""The gradient of one batch, by plain autograd, stored in its row."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradients.batches import Batch
from mfac.layout import ParameterLayout

LossFn = Callable[[Any, Any], Tensor]
Places = tuple[Tensor, ...]
VIEWS_AT_ONCE = 256


class Filled(NamedTuple):
    """The losses of the rows that were filled, and whether loss and rows are surely finite (False: look closer)."""

    losses: list[float]
    is_finite: bool


class BatchGradient:
    """Fills a row with the gradient of a batch.

    Args:
        model: in eval mode.
        loss_fn: (model, batch) -> scalar.
        layout: the parameters, and which of their coordinates are in a row.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, layout: ParameterLayout):
        self.model, self.loss_fn, self.layout = model, loss_fn, layout
        self._is_masked = layout.masked

    def places(self, rows: Float[Tensor, "c d"]) -> Iterator[Places]:
        """For each row, where in it the gradients are to be written.

        Made for some rows at once: one by one, with the cold caches that a backward pass leaves, they are slow.
        """
        if self._is_masked:
            return repeat((), len(rows))
        some = max(1, VIEWS_AT_ONCE // len(self.layout.tensors))
        return chain.from_iterable(map(self.layout.views, rows.split(some)))

    def fill(
        self, batch: Batch, row: Float[Tensor, "d"], places: Places, zeroed: bool = False
    ) -> tuple[float | Tensor, Tensor]:
        """Writes the row; gives the loss, and a number that is finite only if the row is.

        Raises:
            ValueError: the loss is no scalar, or does not depend on the parameters.
        """
        loss = self.loss_fn(self.model, batch)
        if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
            loss = _differentiable(loss)
        grads = torch.autograd.grad(loss, self.layout.tensors, allow_unused=True)
        try:
            torch._foreach_copy_(places, grads)
        except (TypeError, RuntimeError):  # a mask, a parameter without a gradient, or one whose gradient is sparse
            self.layout.flatten(grads, row)
        check = _sum(row)
        # An accelerator is not waited for; a compiled model may use the memory of its loss again, so it is copied.
        return loss.item() if loss.is_cpu else loss.detach().clone(), check


def _sum(row: Float[Tensor, "d"]) -> Float[Tensor, ""]:
    """A sum is much cheaper than isfinite, most of all while the row is in the cache; it is finite only if all are."""
    return row.sum(dtype=torch.float32) if row.dtype.itemsize < 4 else row.sum()


def _differentiable(loss: Any) -> Tensor:
    """The loss as a tensor of no dimension that gradients can be taken of.

    Raises:
        ValueError: it is something else.
    """
    loss = scalar_loss(loss)
    if not loss.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter of the model; loss_fn(model, batch) must call the "
            "model it is given, with gradients on"
        )
    return loss


def scalar_loss(loss: Any) -> Tensor:
    """The loss as a tensor of no dimension.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss  # a view would be a step more in the backward pass
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn(model, batch) must return a scalar tensor, it returned {found}; reduce it by .mean()"
        )
    return loss.reshape(())

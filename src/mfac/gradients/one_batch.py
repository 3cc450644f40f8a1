"""The gradient of one batch, by plain autograd, stored in its row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradients.batches import Batch
from mfac.layout import ParameterLayout

LossFn = Callable[[Any, Any], Tensor]
LARGE = 1 << 14  # numbers in a tensor, on average, from which on tensors are copied one by one


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
        self._sizes = list(layout.sizes)
        self._is_large = layout.dim >= LARGE * len(layout.sizes)

    def fill(self, batch: Batch, row: Float[Tensor, "d"]) -> tuple[float | Tensor, Tensor]:
        """Writes the row; gives the loss and the sum of the row, which is finite only if the row is.

        Raises:
            ValueError: the loss is no scalar, or does not depend on the parameters.
        """
        loss = scalar_loss(self.loss_fn(self.model, batch))
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter of the model; loss_fn(model, batch) must call the "
                "model it is given, with gradients on"
            )
        self._store(torch.autograd.grad(loss, self.layout.tensors, allow_unused=True), row)
        # A sum is much cheaper than isfinite, most of all now that the row is in the cache. It can overflow where the
        # row does not, but never the other way round.
        total = row.sum(dtype=torch.float32) if row.dtype.itemsize < 4 else row.sum()
        # An accelerator is not waited for; a compiled model may use the memory of its loss again, so it is copied.
        return loss.item() if loss.device.type == "cpu" else loss.detach().clone(), total

    def _store(self, grads: Sequence[Tensor | None], row: Float[Tensor, "d"]) -> None:
        """`layout.flatten`, in fewer steps where each gradient is a whole piece of the row, as nearly always."""
        device = row.device
        for grad, kept in zip(grads, self.layout.kept, strict=True):
            if grad is None or kept is not None or grad.is_sparse or grad.device != device:
                self.layout.flatten(grads, row)
                return
        pieces = [grad.reshape(-1) for grad in grads if grad is not None]
        if self._is_large:  # large pieces get into memory faster one by one; `cat` starts faster
            for place, piece in zip(row.split(self._sizes), pieces, strict=True):
                place.copy_(piece)
        else:
            torch.cat(pieces, out=row)


def scalar_loss(loss: Any) -> Tensor:
    """The loss as a tensor of no dimension.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn(model, batch) must return a scalar tensor, it returned {found}; reduce it by .mean()"
        )
    return loss if loss.ndim == 0 else loss.reshape(())  # a view is a step more in the backward pass

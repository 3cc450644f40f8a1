"""The true loss before and after a step, on a few batches that stay the same."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from mfac.columns import Ranks
from mfac.gradients.batches import Batch, move
from mfac.gradients.model_state import evaluation
from mfac.gradients.one_batch import LossFn


class LossProbe:
    """The mean loss over some batches, those of all ranks, in eval mode."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], ranks: Ranks | None = None):
        self.model = model
        self.ranks = Ranks() if ranks is None else ranks
        self.loss_fn = loss_fn
        devices = {parameter.device for parameter in model.parameters()}
        self.batches = [move(batch, *devices) if len(devices) == 1 else batch for batch in batches]

    def __call__(self) -> float:
        """The loss now."""
        with self.ranks.together("the loss"), evaluation(self.model), torch.no_grad():
            losses = [float(self.loss_fn(self.model, batch)) for batch in self.batches]
        if self.ranks.size == 1:
            return sum(losses) / len(losses)
        device = next(self.model.parameters()).device
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64, device=device)
        loss, count = self.ranks.sum_(total).tolist()
        return float(loss / count)

    def before(self) -> float:
        """The loss at the start.

        Raises:
            ValueError: it is not finite.
        """
        loss = self()
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of the model is {loss} before anything is pruned: the model has diverged, or a batch is "
                "broken; nothing was changed"
            )
        return loss

    def after(self) -> float:
        """The loss after a step.

        Raises:
            RuntimeError: it is not finite.
        """
        loss = self()
        if not math.isfinite(loss):
            raise RuntimeError(
                f"the loss became {loss} by this step, which is undone: the weights are those of the step before; "
                "use a larger damping, more recomputations, or a lower sparsity"
            )
        return loss

"""Gradients asked of autograd's engine without what `torch.autograd.grad` does before that.

It goes over all it is given several times, in Python, with the caches cold that the passes leave, which shows on a
small network. What it calls in the end is called here directly, on the CPU; where that is not to be had, and on
accelerators, whose threads it tells about the context, the public way is taken.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import has_torch_function

_run = getattr(getattr(Variable, "_execution_engine", None), "run_backward", None)


class Engine:
    """Runs backward passes; keeps the 1 that they start from."""

    def __init__(self) -> None:
        self._one: Tensor | None = None

    def gradients(self, loss: Tensor, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """∂loss/∂input for each of the inputs; None where the loss does not depend on it. The graph is freed.

        Args:
            loss: a number that requires gradients, as a tensor of no dimension.
            inputs: leaves, or `GradientEdge`s.
        """
        if _run is None or not loss.is_cpu or not loss.is_floating_point() or has_torch_function((loss, *inputs)):
            return torch.autograd.grad(loss, inputs, allow_unused=True)
        one = self._one
        if one is None or one.dtype != loss.dtype or one._version:  # a backward pass has changed what it was given
            one = self._one = torch.ones_like(loss)
        return _run((loss,), (one,), False, False, inputs, True, accumulate_grad=False)

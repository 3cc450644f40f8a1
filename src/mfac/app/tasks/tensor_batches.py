"""Batches of tensors that are in memory: in order, or shuffled anew in every pass."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class TensorBatches:
    """Batches (inputs, targets), as many passes as wanted.

    The order of a shuffled pass is drawn from torch's global random state when the pass begins.

    Args:
        inputs: one a sample, along the first dimension.
        targets: likewise.
        batch_size: of every batch; a smaller last one is left out where batches are shuffled.
        shuffle: a new order in each pass.
        prepare: is given the inputs of a batch (pixels as bytes, say) and returns what the model takes.

    Raises:
        ValueError: lengths that differ, or less than one whole batch.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ):
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets; there must be one target an input")
        if not 1 <= batch_size <= len(inputs):
            raise ValueError(f"batch_size must be from 1 to {len(inputs)}, the number of samples, not {batch_size!r}")
        self.inputs, self.targets = inputs, targets
        self.batch_size, self.shuffle, self.prepare = batch_size, shuffle, prepare

    def __len__(self) -> int:
        whole, rest = divmod(len(self.inputs), self.batch_size)
        return whole + bool(rest and not self.shuffle)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.inputs)
        order = torch.randperm(count) if self.shuffle else torch.arange(count)
        for i in range(len(self)):
            chosen = order[i * self.batch_size : (i + 1) * self.batch_size]
            inputs = self.inputs[chosen]
            yield inputs if self.prepare is None else self.prepare(inputs), self.targets[chosen]
